//! First contact: every subcommand, the commands of the pages, `demo`, `doctor`, and what a machine without the prerequisites is told.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod apparmor;
mod blocks;
mod commands;
mod demo;
mod doctor;
mod pages;
mod prerequisites;
#[path = "../support/mod.rs"]
mod support;
