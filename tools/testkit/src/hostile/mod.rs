//! Adversary guests that break the rules of the split drivers, for benchmarks and for agents on Xen.
//!
//! * [`adversary`]: a guest with a vif: its resources, its handshake and its raw ring access.
//! * [`attacks`]: the bursts of each behaviour of such a guest; [`control`] has those on the control ring.
//! * [`behaviour`]: the behaviours by name.
//! * [`disk`]: the same for a guest with a vbd.
//! * [`handshake`]: the xenbus states, for both.
//!
//! A burst returns an error if the connection ended or if the backend answered wrongly; the latter has a type of its
//! own ([`WrongAnswer`](control::WrongAnswer), [`WrongResponse`](disk::adversary::WrongResponse)).

pub mod adversary;
pub mod attacks;
pub mod behaviour;
pub mod control;
pub mod disk;
pub mod handshake;
