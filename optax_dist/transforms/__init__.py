"""What people chain: gradients in, updates out."""
