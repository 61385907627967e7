"""Running plans on a device."""
