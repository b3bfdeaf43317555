"""What a run tells of itself while it goes on: numbers, and where they go."""
