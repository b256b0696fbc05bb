"""The servers' side of security: where they listen and how, and who gets in. Both services use it."""
