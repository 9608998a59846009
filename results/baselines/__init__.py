"""The same products by others: cuBLAS, llama.cpp, and recorded figures."""
