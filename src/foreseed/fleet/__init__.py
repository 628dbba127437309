"""A real fleet: the coordinator behind MQTT."""
