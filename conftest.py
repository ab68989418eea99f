"""What holds for every property test: none is measured against a clock, because a machine may be busy with something else."""

from hypothesis import HealthCheck, settings

settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")
