//! Sockets that do what a test says.
