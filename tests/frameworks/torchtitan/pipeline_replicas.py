"""torchtitan's debug model of llama3: two pipeline ranks, each with a replica"""

# verdict: same bits
# worlds: 4
# steps: 12
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# parallelism: pipeline 2 x replicas 2
# patience: 250

from tests.frameworks.torchtitan import _example

_example.main(pipeline_parallel=2, data_parallel_replicate=2, data_parallel_shard=1)
