//! Egress policies end to end.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod asking;
mod asking_clients;
mod attacks;
mod clients;
mod first_policy;
mod front_questions;
mod fronts;
mod limits;
mod policy;
mod presets;
mod refusals;
#[path = "../support/mod.rs"]
mod support;
mod upstream;
