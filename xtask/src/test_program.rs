//! Test program that runs alone, for a soak or the random attack, from the build that all steps share.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Context as _;
use taskkit::exec::Cmd;

use crate::context::Context;

/// Builds the integration test `target` of the package in the folder `krate`, and runs it with these arguments and variables.
/// Returns `false` if a test failed.
///
/// # Errors
///
/// Returns an error if the arguments select no test: the name of one has changed.
pub(crate) fn run(
    root: &Path,
    (krate, target): (&str, &str),
    arguments: &[&str],
    variables: &[(&str, OsString)],
) -> anyhow::Result<bool> {
    let mut context = Context::new(root.to_owned())?;
    context.programs = vec![target.to_owned()];
    let mut programs = context.built()?.iter();
    let program = programs.find(|program| program.krate == krate && program.target == target);
    let program = program.with_context(|| format!("cargo built no test {krate}/{target}"))?;
    program.ensure_tests(arguments)?;
    let command = Cmd::new(&program.file).args(arguments).env("PATH", context.toolbox.path());
    let command = variables.iter().fold(command, |command, (name, value)| command.env(name, value));
    Ok(command.run(&program.folder)?)
}
