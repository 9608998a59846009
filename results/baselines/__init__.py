"""The same products by others: Humming's layers, and figures that were recorded elsewhere."""
