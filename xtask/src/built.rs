//! One build of all test programs, from cargo's messages: unit tests of every crate, and integration tests.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::{Cmd, TEST_PROFILE};

/// Kinds of test programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Tests in the sources of a library or a program.
    Sources,
    /// File or folder in `tests`.
    Integration,
}

/// Test program that cargo built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Name of the package's folder, such as `net`.
    pub(crate) krate: String,
    /// Name of the target: of the library, the program or the integration test.
    pub(crate) target: String,
    pub(crate) kind: Kind,
    pub(crate) file: PathBuf,
    /// Folder of the package, in which the program runs.
    pub(crate) folder: PathBuf,
}

impl Program {
    /// Returns the name for reports: `net` for unit tests, `net/vif` for an integration test.
    pub(crate) fn name(&self) -> String {
        match self.kind {
            Kind::Sources => self.krate.clone(),
            Kind::Integration => format!("{}/{}", self.krate, self.target),
        }
    }

    /// Checks that the program has tests for these arguments: a filter for the name of a test that has changed selects none,
    /// and the program passes.
    pub(crate) fn ensure_tests(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let command = Cmd::new(&self.file).args(arguments).args(["--list"]);
        let listed = command.output(&self.folder)?;
        let listed = listed.map_err(|message| anyhow::anyhow!("{}: {message}", self.name()))?;
        let has_tests = listed.lines().any(|line| line.ends_with(": test"));
        anyhow::ensure!(has_tests, "{} has no test for {}", self.name(), arguments.join(" "));
        Ok(())
    }
}

/// Integration test of the benchmarks. Cargo builds `ringfence-bench` with it, which other tests start.
pub(crate) const WITH_BENCH: &str = "bench_guests";

/// Builds test programs and the programs that they start: all, or the integration tests in `names`. Returns `None` if the
/// build failed.
pub(crate) fn build(
    root: &Path,
    command: Cmd,
    names: &[String],
) -> anyhow::Result<Option<Vec<Program>>> {
    // The workspace as a whole determines the features of its crates, so a part needs no other build of them.
    let mut command = command.args(["test", "--profile", TEST_PROFILE, "--workspace"]);
    command = if names.is_empty() {
        command.args(["--lib", "--bins", "--tests"])
    } else {
        let names = names.iter().map(String::as_str).chain([WITH_BENCH]);
        command.args(names.flat_map(|name| ["--test", name]))
    };
    let command = command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let Some(messages) = command.captured(root)? else { return Ok(None) };
    let programs = programs(&messages)?;
    anyhow::ensure!(!programs.is_empty(), "cargo built no test program");
    Ok(Some(programs))
}

/// Returns the test programs in cargo's messages, one JSON object in each line.
pub(crate) fn programs(messages: &str) -> anyhow::Result<Vec<Program>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's messages")?;
        let text = |path: &str| message.pointer(path).and_then(serde_json::Value::as_str);
        let is_test = message.pointer("/profile/test") == Some(&serde_json::Value::Bool(true));
        let (Some(file), true) = (text("/executable"), is_test) else { continue };
        let target = text("/target/name").context("a target has a name")?.to_owned();
        let folder = text("/manifest_path").map(Path::new).and_then(Path::parent);
        let folder = folder.context("a package has a folder")?.to_owned();
        let krate = folder.file_name().context("a package's folder has a name")?;
        let krate = krate.to_string_lossy().into_owned();
        let kind =
            if text("/target/kind/0") == Some("test") { Kind::Integration } else { Kind::Sources };
        found.push(Program { krate, target, kind, file: file.into(), folder });
    }
    found.sort_by_key(|program| (program.name(), program.target.clone()));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_messages_are_those_with_tests() {
        let messages = r#"{"reason":"build-script-executed"}
{"manifest_path":"/w/crates/net/Cargo.toml","target":{"kind":["test"],"name":"vif"},"profile":{"test":true},"executable":"/t/vif-1"}
{"manifest_path":"/w/crates/net/Cargo.toml","target":{"kind":["lib"],"name":"ringfence_net"},"profile":{"test":true},"executable":"/t/net-2"}
{"manifest_path":"/w/crates/ringfence/Cargo.toml","target":{"kind":["bin"],"name":"ringfence"},"profile":{"test":false},"executable":"/t/ringfence"}
{"manifest_path":"/w/crates/net/Cargo.toml","target":{"kind":["lib"],"name":"ringfence_net"},"profile":{"test":false},"executable":null}"#;
        let found = programs(messages).unwrap();
        let names: Vec<_> = found.iter().map(Program::name).collect();
        assert_eq!(names, ["net", "net/vif"]);
        assert_eq!(found[1].kind, Kind::Integration);
        assert_eq!(found[1].folder, Path::new("/w/crates/net"));
        assert!(programs("no JSON").is_err());
    }
}
