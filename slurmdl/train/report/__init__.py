"""What a run measured: its meters, and what is drawn from them."""
