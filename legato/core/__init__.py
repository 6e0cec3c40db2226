"""The vocabulary of Legato: messages, requests, events, usage and errors. Imports nothing but the standard library."""
