"""The engine that multiplies by cuBLASMp."""
