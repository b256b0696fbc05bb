"""torchtitan's debug model of llama3: a pipeline of two, with two stages a rank"""

# verdict: same bits
# worlds: 2
# steps: 12
# kills: forward, backward, optimizer, tail, idle, save, moment, optimizer
# parallelism: pipeline 2
# patience: 250

from tests.frameworks.torchtitan import _example

_example.main(pipeline_parallel=2)
