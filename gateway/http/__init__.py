"""What happens around every HTTP request."""
