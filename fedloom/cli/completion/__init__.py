"""What Tab offers, without importing torch."""
