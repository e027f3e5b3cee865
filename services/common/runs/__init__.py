"""Runs as commands find them: folders by name, how they ended, where answers lie."""
