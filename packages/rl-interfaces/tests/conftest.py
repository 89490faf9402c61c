from hypothesis import settings

# No time is a fault where other work may share the processor.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
