#![forbid(unsafe_code)]
//! Egress policy by name: decides which names, addresses and ports a guest may reach. No I/O.
//!
//! The caller carries the guest's packets. It shows DNS queries, DNS answers, new connections and their first
//! bytes to a [`Gate`], and acts on the verdicts:
//!
//! | event | call | decided by |
//! |---|---|---|
//! | DNS query | [`Gate::query`] | rules for names; others are refused and never leave |
//! | DNS answer | [`Gate::answer`] | pins the addresses; refuses private ones for public names |
//! | new connection | [`Gate::connect`], [`Gate::connect_to_name`] | rules for addresses, then the pinned names |
//! | first bytes of an allowed connection | [`Gate::check`] | server name of TLS or QUIC, or HTTP host |
//!
//! [`policy`] has the order of rules, [`rule`] their grammar, [`mod@file`] the form of policy files. Every table is
//! bounded, no input makes the crate panic, and times are those of the caller's clock.

pub mod approvals;
pub mod denials;
pub mod dns;
pub mod edit;
pub mod file;
pub mod first;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod gate;
pub mod http;
pub mod name;
pub mod pins;
pub mod policy;
pub mod quic;
pub mod ranges;
pub mod record;
pub mod refusal;
pub mod rule;
pub mod substitutes;
#[cfg(test)]
mod testing;
pub mod tls;

pub use approvals::Subject;
pub use gate::Gate;
pub use name::HostName;
pub use policy::{Cause, Policy, PolicySource, RuleSource, Verdict};
pub use rule::{Action, Protocol, Rule};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
