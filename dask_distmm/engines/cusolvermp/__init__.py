"""The engine for factorizations on GPUs of several hosts: cuSOLVERMp and cuBLASMp; see `engine`."""
