"""Cuts shared by operators: how tensors are divided among programs. No tile maths, no device."""
