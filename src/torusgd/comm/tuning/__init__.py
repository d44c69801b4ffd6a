"""What an all-reduce takes on this network: prices of schedules, measurements, and the profile that holds them."""
