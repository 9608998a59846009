"""How right a decoder is: against torch, float32 and llama.cpp; products emulated on a CPU."""
