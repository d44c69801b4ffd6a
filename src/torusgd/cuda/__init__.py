"""What a GPU does otherwise than the plain step: captured graphs, steps taken ahead, sums and updates on the device."""
