"""For VERL_USE_EXTERNAL_MODULES: every process of verl that imports this knows the policy loss `llds`."""

from unspiral_health.adapters.verl import register
from unspiral_health.llds import LLDS

register(LLDS.from_environment())
