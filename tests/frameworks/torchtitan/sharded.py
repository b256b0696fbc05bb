"""torchtitan's debug model of llama3 in two shards, without a pipeline"""

# verdict: same bits
# worlds: 2
# steps: 12
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# parallelism: FSDP 2
# patience: 250

from tests.frameworks.torchtitan import _example

_example.main(data_parallel_shard=2)
