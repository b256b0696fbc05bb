"""A device that is as asynchronous as CUDA and stricter, for tests of what runs on devices.

simulated.cpp is the device, simulated.py makes `torch.device("simulated")` of it and has what tests steer it with.
conftest.py runs each test of this folder in a process of its own (process.py). test_strictness.py breaks each rule of
the device once; test_training.py trains a GPT on it. test_accelerator.py, test_capture.py and test_staging.py hold the
product against it, in the words of machine.py: `tests/gpu` runs the same functions on CUDA. test_mutants.py puts
mistakes in, for each of which one of those tests has to fail.
"""
