//! Adversary guests with a disk.

pub mod adversary;
pub mod attacks;
pub mod behaviour;
