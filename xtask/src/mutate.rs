//! `cargo xtask mutate`: removes each guard in `xtask/mutations.toml` and requires that its test fails.
//!
//! An entry has the text of the guard, the text that replaces it, and the `cargo test` arguments of its
//! test. The work is done in a scratch worktree of the last commit, below the target directory. Each test
//! runs on the unchanged sources first and must pass there, because a test that always fails proves nothing.
//! A mutation that does not build is an error, because no test ran. Without a guard against blocking a test may
//! block for ever, so each has a time limit; a test that is ended by it has caught the mutation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde::Deserialize;
use taskkit::exec::{Cmd, TestRun};

/// Path of the mutation list, relative to the root.
pub(crate) const LIST: &str = "xtask/mutations.toml";

/// Time limit of a test in seconds, without its build.
const TIME_LIMIT: &str = "300";

/// Arguments of `cargo xtask mutate`.
#[derive(Args)]
pub(crate) struct MutateArgs {
    /// Names of mutations; all if none is given
    names: Vec<String>,
    /// Print the list and run nothing
    #[arg(long)]
    list: bool,
}

/// Contents of the mutation list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutation: Vec<Mutation>,
}

/// One guard, the change that removes it, and the test that then fails.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mutation {
    /// Unique name in the list.
    pub(crate) name: String,
    /// Adversary that the guard protects against, as in docs/threat-model.md.
    pub(crate) party: String,
    /// Guarantee that the guard gives.
    pub(crate) promise: String,
    /// Path of the source file, relative to the root.
    pub(crate) file: String,
    /// Text of the guard, which occurs once in the file.
    pub(crate) from: String,
    /// Text that replaces the guard.
    pub(crate) to: String,
    /// Arguments of `cargo test`; the last is the name of the test.
    pub(crate) test: String,
}

/// Parses the text of the mutation list.
pub(crate) fn parse(text: &str) -> anyhow::Result<Vec<Mutation>> {
    let list: List = toml::from_str(text).with_context(|| format!("reading {LIST}"))?;
    Ok(list.mutation)
}

/// Runs the selected mutations. Returns `false` if a removed guard made no test fail.
pub(crate) fn run(args: &MutateArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let mut all = parse(&std::fs::read_to_string(root.join(LIST))?)?;
    for name in &args.names {
        ensure!(all.iter().any(|m| m.name == *name), "{LIST} has no mutation `{name}`");
    }
    all.retain(|mutation| args.names.is_empty() || args.names.contains(&mutation.name));
    if args.list {
        all.iter().for_each(|m| println!("{:<40} {}: {}", m.name, m.party, m.promise));
        return Ok(true);
    }
    let scratch = Scratch::new(root, target)?;
    let mut passes = BTreeMap::new();
    let mut results = Vec::new();
    for mutation in &all {
        println!("\n==== {}: {}", mutation.name, mutation.promise);
        let result = attempt(mutation, &scratch, &mut passes);
        results.push((mutation.name.as_str(), result));
    }
    println!();
    let mut success = true;
    for (name, result) in &results {
        success &= result.is_ok();
        match result {
            Ok(caught) => println!("{name}: caught, {caught}"),
            Err(why) => println!("{name}: NOT CAUGHT: {why:#}"),
        }
    }
    Ok(success)
}

/// Removes one guard and runs its test. Returns the effect on the test.
fn attempt(
    mutation: &Mutation,
    scratch: &Scratch,
    passes: &mut BTreeMap<String, bool>,
) -> anyhow::Result<String> {
    let path = scratch.tree.join(&mutation.file);
    let source = std::fs::read_to_string(&path)
        .with_context(|| format!("{}: is the change committed?", mutation.file))?;
    let mutated = mutate(&source, mutation)?;
    if !passes.contains_key(&mutation.test) {
        let run = scratch.test(&mutation.test)?;
        passes.insert(mutation.test.clone(), run.success && run.passed > 0);
    }
    ensure!(passes[&mutation.test], "`cargo test {}` fails without any change", mutation.test);
    std::fs::write(&path, mutated)?;
    let run = scratch.test(&mutation.test);
    std::fs::write(&path, source)?;
    let run = run?;
    match run.failed {
        0 if run.success => bail!("its test passes"),
        0 => Ok(format!("its test did not end within {TIME_LIMIT} s, or was killed")),
        failed => Ok(format!("{failed} failed")),
    }
}

/// Returns the source without the guard.
fn mutate(source: &str, mutation: &Mutation) -> anyhow::Result<String> {
    let count = source.matches(&mutation.from).count();
    ensure!(count == 1, "{}: the guard's text occurs {count} times", mutation.file);
    Ok(source.replacen(&mutation.from, &mutation.to, 1))
}

/// Worktree of the last commit, with a target directory that later runs use again.
struct Scratch {
    root: PathBuf,
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn new(root: &Path, target: &Path) -> anyhow::Result<Scratch> {
        let tree = target.join("mutate-tree");
        let scratch = Scratch { root: root.to_owned(), tree, target: target.join("mutate-target") };
        scratch.remove();
        let add = Cmd::new("git").args(["worktree", "add", "--quiet", "--force", "--detach"]);
        let add = add.args([scratch.tree.as_os_str(), "HEAD".as_ref()]);
        add.output(root)?.map_err(anyhow::Error::msg).context("git worktree add")?;
        Ok(scratch)
    }

    fn test(&self, words: &str) -> anyhow::Result<TestRun> {
        let build = Cmd::cargo().args(["test", "--no-run"]).args(words.split_whitespace());
        let build = build.env("CARGO_TARGET_DIR", self.target.as_os_str());
        build.output(&self.tree)?.map_err(anyhow::Error::msg).context("it does not build")?;
        let test = Cmd::new("timeout").args(["--kill-after=5", TIME_LIMIT, "cargo", "test"]);
        // The test may be one of the long set.
        let test = test.args(words.split_whitespace()).args(["--", "--include-ignored"]);
        let test = test.env("CARGO_TARGET_DIR", self.target.as_os_str());
        Ok(test.run_tests(&self.tree)?)
    }

    /// Removes the worktree if it exists.
    fn remove(&self) {
        let remove = Cmd::new("git").args(["worktree", "remove", "--force"]);
        // Fails without a worktree, which is no error.
        let _ = remove.args([self.tree.as_os_str()]).output(&self.root);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: &str = "[[mutation]]\nname = \"n\"\nparty = \"frontend\"\npromise = \"p\"\n\
        file = \"a.rs\"\nfrom = \"if x {\"\nto = \"if false {\"\ntest = \"-p a b\"\n";

    #[test]
    fn guard_that_occurs_once_is_replaced() {
        let list = parse(ENTRY).unwrap();
        assert_eq!(mutate("if x {}", &list[0]).unwrap(), "if false {}");
        assert!(mutate("if y {}", &list[0]).is_err());
        assert!(mutate("if x {} if x {}", &list[0]).is_err());
    }

    #[test]
    fn list_with_unknown_key_is_refused() {
        assert!(parse(&format!("{ENTRY}reason = \"?\"\n")).is_err());
    }
}
