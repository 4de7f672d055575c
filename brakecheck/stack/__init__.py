"""What is under test: spec strings, CUDA toolchains from wheels, environments, compatibility rules."""
