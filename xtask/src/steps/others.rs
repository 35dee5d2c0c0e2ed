//! Steps that run machines, fuzz targets and other programs' systems.

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::text::count;
use vm_lab::CorePart;

use crate::context::{Context, Ended, outcome_of};
use crate::report::Outcome;
use crate::tidy;

/// Runs the scenarios that show that each kind of machine works.
pub(super) fn vm_short(context: &Context) -> anyhow::Result<Ended> {
    scenarios(context, CorePart::Short)
}

/// Runs the other core scenarios of a suite.
pub(super) fn vm(context: &Context, part: &str) -> anyhow::Result<Ended> {
    scenarios(context, if part == "xen" { CorePart::Xen } else { CorePart::Linux })
}

fn scenarios(context: &Context, part: CorePart) -> anyhow::Result<Ended> {
    match vm_lab::core(&context.root, &context.target, &context.toolbox, part) {
        Ok(Ok(note)) => Ok(Outcome::Passed(note).into()),
        Ok(Err(failed)) => Ok(Outcome::Failed(failed).into()),
        Err(error) => {
            error.downcast().map(|vm_lab::Unavailable(reason)| Outcome::Skipped(reason).into())
        }
    }
}

/// Returns the suites of `cargo xtask clients`.
pub(super) fn client_parts(context: &Context) -> anyhow::Result<Vec<String>> {
    let mut names = vec![];
    for entry in std::fs::read_dir(context.root.join("clients"))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

pub(super) fn clients(context: &Context, suite: &str) -> anyhow::Result<Ended> {
    if !context.toolbox.is_root {
        return Ok(Outcome::Skipped("only root can install a Debian system".to_owned()).into());
    }
    let success = context.own_command(&["clients", suite])?.run(&context.root)?;
    Ok(outcome_of(success, "a scenario failed with Ringfence"))
}

pub(super) fn fuzz_smoke(context: &Context) -> anyhow::Result<Ended> {
    let manifest = context.root.join("fuzz/Cargo.toml");
    let manifest = std::fs::read_to_string(&manifest)
        .with_context(|| format!("reading {}", manifest.display()))?;
    let targets = tidy::fuzz_targets(&manifest)?;
    if targets.is_empty() {
        return Ok(outcome_of(false, "fuzz/Cargo.toml lists no fuzz target"));
    }
    if !fuzz(context, &["build"]).run(&context.root)? {
        return Ok(outcome_of(false, "the fuzz targets do not build"));
    }
    let limit = format!("-max_total_time={}", context.fuzz_seconds);
    let mut failed = vec![];
    for target in &targets {
        // libFuzzer writes its findings to the first corpus and only reads the second, which is checked in.
        let found = context.target.join("fuzz-corpus").join(target);
        std::fs::create_dir_all(&found)?;
        let mut command = fuzz(context, &["run", target]).args([found.as_os_str()]);
        let seeds = context.root.join("fuzz/seeds").join(target);
        if seeds.is_dir() {
            command = command.args([seeds.as_os_str()]);
        }
        let command = command.args([
            "--",
            limit.as_str(),
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-verbosity=0",
        ]);
        if !command.run(&context.root)? {
            failed.push(target.as_str());
        }
    }
    Ok(if failed.is_empty() {
        let note = format!("{}, {} s each", count(targets.len(), "target"), context.fuzz_seconds);
        Outcome::Passed(note).into()
    } else {
        outcome_of(false, &format!("{} (the input is below fuzz/artifacts)", failed.join(", ")))
    })
}

/// Returns a `cargo fuzz` of the nightly toolchain, independent of the toolchain of this xtask.
fn fuzz(context: &Context, args: &[&str]) -> Cmd {
    Cmd::new("rustup")
        .args(["run", "nightly", "cargo", "fuzz"])
        .args(args.iter().copied())
        .env("PATH", context.toolbox.path())
        .env("CARGO_TARGET_DIR", context.target.join("fuzz"))
        .env_remove("CARGO")
        .env_remove("RUSTUP_TOOLCHAIN")
}
