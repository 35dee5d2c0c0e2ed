//! The xenbus handshake, as far as it is the same for every kind of device.

pub mod steps;
