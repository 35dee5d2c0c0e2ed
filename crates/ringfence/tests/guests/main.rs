//! Guests of `run`: their processes, users, terminals and names.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod command;
mod guests;
mod identity;
mod library;
mod limits;
#[path = "../support/mod.rs"]
mod support;
mod terminal;
mod top;
