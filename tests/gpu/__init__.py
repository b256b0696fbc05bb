"""What is proven and measured on a CUDA device alone. Skipped where there is none: then nothing here is proven."""
