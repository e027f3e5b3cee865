"""What a resumed run may change."""
