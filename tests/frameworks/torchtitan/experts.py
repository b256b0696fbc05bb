"""torchtitan's debug model of deepseek_v3: experts on two ranks, which are shards as well"""

# verdict: same bits
# worlds: 2
# steps: 12
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# parallelism: FSDP 2 = experts 2
# patience: 250

from tests.frameworks.torchtitan import _example

_example.main(
    data_parallel_shard=2, expert_parallel=2, model="--module deepseek_v3 --config deepseek_v3_debugmodel"
)
