//! `cargo xtask clients`: programs that start `pasta`, with Ringfence's and with Debian's. `clients/README.md` explains
//! how to write a scenario.
//!
//! ```text
//! cache: Debian system + programs      ([`system`])
//!   │ one scenario: clients/host.sh, in namespaces of its own, as a host with an outside network
//!   ├── with Ringfence as `pasta`  ──> results ─┐
//!   └── with Debian's `pasta`      ──> results ─┴─> table    ([`report`])
//! ```
//!
//! A scenario is a shell script that writes the same lines as those of `cargo xtask vm` ([`results`]).

mod report;
mod system;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use taskkit::exec::Cmd;
use taskkit::tools::{self, Tool, Toolbox};
use vm_lab::results::{self, Line, Tally};
use vm_lab::scenario::field;

use report::Row;
use system::{OLD_PODMAN, Peer, Programs, System};

/// Tools that must be installed.
static NEEDS: &[&Tool] = &[&tools::DEBOOTSTRAP];

/// Arguments of `cargo xtask clients`.
#[derive(Args)]
pub(crate) struct ClientsArgs {
    /// Program whose scenarios run; without it, all of them
    suite: Option<Suite>,
    /// Run these scenarios; without one, all of the suite
    #[arg(value_name = "SCENARIO", requires = "suite")]
    scenarios: Vec<String>,
    /// Print the scenarios, and run nothing
    #[arg(long)]
    list: bool,
    /// Run only with one of the two programs called `pasta`
    #[arg(long, value_name = "WHOSE")]
    only: Option<Peer>,
    /// Use this `ringfence` instead of building one
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Multiply every time limit by this factor, for a busy or slow computer
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    patience: u32,
    /// Directory for the Debian system and the programs; by default `clients` in the target directory
    #[arg(long, value_name = "FOLDER", env = "RINGFENCE_CLIENTS_CACHE")]
    cache: Option<PathBuf>,
    /// Folder with another Podman than Debian's, and programs that belong to it such as netavark
    #[arg(long, value_name = "FOLDER")]
    podman: Option<PathBuf>,
    /// Folder test/system of Podman's source, of the version that is installed; its tests of pasta run, too
    #[arg(long, value_name = "FOLDER")]
    podman_tests: Option<PathBuf>,
    /// Print the log of each scenario
    #[arg(long, short)]
    verbose: bool,
    /// Install nothing
    #[arg(long)]
    no_install: bool,
}

/// Programs that start `pasta`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    Podman,
    Rootlesskit,
    /// passt's own tests of pasta
    Namespaces,
    /// pesto, Ringfence's and passt's
    Pesto,
    /// QEMU and libvirt
    Machines,
}

impl Suite {
    fn name(self) -> &'static str {
        match self {
            Suite::Podman => "podman",
            Suite::Rootlesskit => "rootlesskit",
            Suite::Namespaces => "namespaces",
            Suite::Pesto => "pesto",
            Suite::Machines => "machines",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Scenario {
    suite: Suite,
    name: String,
    title: String,
    /// Time limit in seconds.
    limit: u32,
    /// Set if the scenario is for the Podman of Debian 12, too.
    is_for_old: bool,
}

/// Runs `cargo xtask clients`. Returns `false` if a scenario failed with Ringfence.
pub(crate) fn run(args: &ClientsArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let selected = select(args, root)?;
    if args.list {
        for Scenario { suite, name, title, .. } in &selected {
            println!("{:11}  {name:9}  {title}", suite.name());
        }
        return Ok(true);
    }
    let toolbox = Toolbox::new(root, target);
    anyhow::ensure!(toolbox.is_root, "the host of a scenario needs root: namespaces and mounts");
    let mut missing = toolbox.missing(NEEDS);
    if !missing.is_empty() && !args.no_install {
        toolbox.install(&missing)?;
        missing = toolbox.missing(NEEDS);
    }
    anyhow::ensure!(missing.is_empty(), "{}", tools::how_to_get(&missing));
    let program = match &args.program {
        Some(program) => std::path::absolute(program)?,
        None => build(root, target)?,
    };
    let cache = args.cache.clone().unwrap_or_else(|| target.join("clients"));
    let podman = args.podman.as_ref().map(std::path::absolute).transpose()?;
    let under_test = Programs { ringfence: program, podman };
    let system = System::prepare(&std::path::absolute(cache)?, under_test, &toolbox)?;
    let peers = args.only.map_or_else(|| Peer::value_variants().to_vec(), |peer| vec![peer]);
    let start = Instant::now();
    let mut rows = vec![];
    for scenario in &selected {
        let clients = system.clients(scenario.suite).into_iter();
        for client in clients.filter(|client| client != OLD_PODMAN || scenario.is_for_old) {
            let tallies = peers.iter().map(|peer| {
                let tally = run_scenario(root, &system, scenario, &client, *peer, args)?;
                print!("{}", report::scenario(&client, *peer, &tally));
                Ok((*peer, tally))
            });
            let tallies = tallies.collect::<anyhow::Result<Vec<_>>>()?;
            rows.push(Row { client: client.clone(), scenario: scenario.name.clone(), tallies });
        }
    }
    let versions = system.versions();
    println!("{}", report::table(&rows, &versions, start.elapsed()));
    Ok(rows
        .iter()
        .flat_map(|row| &row.tallies)
        .all(|(peer, tally)| *peer != Peer::Ringfence || tally.failures().is_empty()))
}

fn build(root: &Path, target: &Path) -> anyhow::Result<PathBuf> {
    let built = Cmd::cargo().args(["build", "--release", "--package", "ringfence"]).run(root)?;
    anyhow::ensure!(built, "ringfence does not build");
    Ok(target.join("release/ringfence"))
}

/// Returns the scenarios that the arguments name.
fn select(args: &ClientsArgs, root: &Path) -> anyhow::Result<Vec<Scenario>> {
    let mut found = vec![];
    for suite in Suite::value_variants().iter().filter(|s| args.suite.is_none_or(|w| w == **s)) {
        found.extend(find(&root.join("clients").join(suite.name()), *suite)?);
    }
    for name in &args.scenarios {
        let is_known = found.iter().any(|scenario| scenario.name == *name);
        anyhow::ensure!(is_known, "no scenario is called {name}; --list names them");
    }
    found.retain(|one| args.scenarios.is_empty() || args.scenarios.contains(&one.name));
    Ok(found)
}

/// Returns the scenarios in a folder by name.
fn find(folder: &Path, suite: Suite) -> anyhow::Result<Vec<Scenario>> {
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".sh"));
        let Some(name) = name.filter(|name| *name != "lib") else { continue };
        let text = std::fs::read_to_string(&path)?;
        let scenario = parse(suite, name, &text).with_context(|| path.display().to_string())?;
        found.push(scenario);
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn parse(suite: Suite, name: &str, text: &str) -> anyhow::Result<Scenario> {
    let limit = field(text, "limit")?.parse().context("`# limit: ...` is a number of seconds")?;
    let title = field(text, "title")?.to_owned();
    let is_for_old = field(text, "also").is_ok_and(|client| client == OLD_PODMAN);
    Ok(Scenario { suite, name: name.to_owned(), title, limit, is_for_old })
}

/// Runs a scenario on a host of its own.
fn run_scenario(
    root: &Path,
    system: &System,
    scenario: &Scenario,
    client: &str,
    peer: Peer,
    args: &ClientsArgs,
) -> anyhow::Result<Tally> {
    let folder = system.new_run(&format!("{client}-{}-{}", scenario.name, peer.name()))?;
    let (results, log) = (folder.join("results"), folder.join("scenario.log"));
    std::fs::write(&results, "")?;
    let host = root.join("clients/host.sh");
    let limit = (scenario.limit * args.patience).to_string();
    let words = ["-s", "KILL", &limit, "unshare", "--net", "--mount", "--pid", "--fork"];
    let command = Cmd::new("timeout")
        .args(words)
        .args(["--kill-child", "sh"])
        .args([host.as_os_str(), system.root().as_os_str(), system.programs(peer).as_os_str()])
        .args([results.as_os_str()])
        .args([scenario.suite.name(), &scenario.name, client]);
    let command = match &args.podman_tests {
        Some(tests) => command.env("PODMAN_TESTS", std::path::absolute(tests)?),
        None => command,
    };
    let start = Instant::now();
    let status = command.run_to_file(root, &log)?;
    let mut tally = Tally::new(&scenario.name);
    for line in std::fs::read_to_string(&results)?.lines() {
        tally.take(&results::read(line));
    }
    tally.time = start.elapsed();
    tally.take(&Line::End(scenario.name.clone(), status));
    if args.verbose || !tally.failures().is_empty() {
        let text = std::fs::read(&log)?;
        println!("---- {}\n{}", log.display(), String::from_utf8_lossy(&text));
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_scenario_are_parsed() {
        let text = "# title: a container runs\n# limit: 30\n\ncomplete_scenario\n";
        let scenario = parse(Suite::Podman, "run", text).unwrap();
        assert_eq!((scenario.title.as_str(), scenario.limit), ("a container runs", 30));
        let error = parse(Suite::Podman, "run", "# title: none\n").unwrap_err();
        assert!(error.to_string().contains("# limit:"), "{error:#}");
    }

    #[test]
    fn scenarios_of_the_repository_have_their_fields() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for suite in Suite::value_variants() {
            assert!(!find(&root.join("clients").join(suite.name()), *suite).unwrap().is_empty());
        }
    }
}
