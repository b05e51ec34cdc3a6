"""Any function in 16 bits: products are narrow, all else is in float32 but kept narrow."""
