"""torchtitan's debug model of llama3: two pipeline ranks, each of two shards"""

# verdict: same bits
# worlds: 4
# steps: 12
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# parallelism: pipeline 2 x FSDP 2
# plain: 4
# patience: 250

from tests.frameworks.torchtitan import _example

_example.main(pipeline_parallel=2, data_parallel_shard=2)
