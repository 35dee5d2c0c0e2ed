//! Steps that check the sources and dependencies.

use crate::context::{Context, Ended, outcome_of};
use crate::report::Outcome;
use crate::tidy;
use taskkit::text::count;

pub(super) fn fmt(context: &Context) -> anyhow::Result<Ended> {
    let success = context.cargo(&["fmt", "--all", "--check"]).run(&context.root)?;
    Ok(outcome_of(success, "not formatted: run `cargo fmt --all`"))
}

pub(super) fn tidy(context: &Context) -> anyhow::Result<Ended> {
    // The parser keeps all that it has read until its thread ends: hundreds of megabytes, which the tests may need.
    let root = &context.root;
    let check = std::thread::scope(|scope| scope.spawn(|| tidy::check(root)).join());
    let findings = check.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    print!("{}", tidy::describe(&findings));
    Ok(outcome_of(findings.is_empty(), &count(findings.len(), "finding")))
}

pub(super) fn deny(context: &Context) -> anyhow::Result<Ended> {
    let command =
        context.cargo(&["deny", "check", "--hide-inclusion-graph", "licenses", "bans", "sources"]);
    Ok(outcome_of(command.run(&context.root)?, "see deny.toml for what is allowed, and why"))
}

pub(super) fn advisories(context: &Context) -> anyhow::Result<Ended> {
    if let Err(error) = context.cargo(&["deny", "fetch", "db"]).output(&context.root)? {
        print!("{error}");
        let reason = "the database at github.com/RustSec/advisory-db cannot be fetched: \
                      needs the network and git";
        return Ok(Outcome::Skipped(reason.to_owned()).into());
    }
    let command = context.cargo(&["deny", "check", "--disable-fetch", "advisories"]);
    Ok(outcome_of(command.run(&context.root)?, "a dependency has a known vulnerability"))
}

pub(super) fn clippy(context: &Context) -> anyhow::Result<Ended> {
    let args = ["clippy", "--workspace", "--all-targets", "--keep-going", "--", "-D", "warnings"];
    Ok(outcome_of(context.cargo(&args).run(&context.root)?, "clippy has warnings"))
}

pub(super) fn doc(context: &Context) -> anyhow::Result<Ended> {
    let command = context.cargo(&["doc", "--workspace", "--no-deps", "--keep-going"]);
    let success = command.env("RUSTDOCFLAGS", "-D warnings").run(&context.root)?;
    Ok(outcome_of(success, "cargo doc has warnings"))
}
