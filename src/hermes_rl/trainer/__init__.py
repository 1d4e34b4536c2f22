"""The training loop: batches in, optimizer steps through the Tinker SDK, new weights out."""
