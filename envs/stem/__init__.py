"""Environment `stem`: science questions, with a search tool."""
