//! Step `empty-path`: the tests of the step `local`, each in a process whose PATH has the programs of every Debian system, and
//! those that the test asks for (`tests/support/needs.rs` of `crates/ringfence`). A test that starts another program fails.

use std::ffi::OsString;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;

use super::tests::{default_orders, is_local, local_programs, part_of};
use crate::built::Program;
use crate::context::{Context, Ended, test_outcome};
use crate::programs::{self, Order};
use crate::report::Outcome;

/// Variable with the PATH in which tests look for what they ask for.
const PROGRAMS: &str = "RINGFENCE_TEST_PROGRAMS";

/// Programs that Debian's alternatives provide beside the packages' own.
const ALTERNATIVES: [&str; 2] = ["awk", "which"];

/// Test programs of the default set.
pub(super) fn parts(context: &Context) -> anyhow::Result<Vec<String>> {
    local_programs(context)
}

/// Runs each test of a program alone.
pub(super) fn run(context: &Context, part: &str) -> anyhow::Result<Ended> {
    let Some(base) = programs_of_every_system()? else {
        let reason = "dpkg is not installed, which lists the programs of every Debian system";
        return Ok(Outcome::Skipped(reason.to_owned()).into());
    };
    let paths = Paths::new(&base)?;
    let mut orders = vec![];
    // `--only` names the part of this step; the orders are those of `local`.
    for order in default_orders(context, "", is_local)? {
        if part_of(&order.program) == part {
            for test in tests(&order)? {
                let args = vec![test, "--exact".to_owned()];
                let path = Some(paths.next(orders.len())?);
                orders.push(Order { program: order.program.clone(), args, path, ..order });
            }
        }
    }
    let mut setting = context.setting(true);
    setting.env.push((PROGRAMS.to_owned(), context.toolbox.path().clone()));
    setting.is_brief = true;
    Ok(test_outcome(programs::run(orders, &setting)))
}

/// Returns the names of the tests that an order would run.
fn tests(order: &Order) -> anyhow::Result<Vec<String>> {
    let all = list(&order.program, &["--list"])?;
    // Programs without libtest list everything, and know no ignored tests.
    let ignored = list(&order.program, &["--list", "--ignored"])?;
    let is_ignored = |name: &String| ignored.len() < all.len() && ignored.contains(name);
    let is_chosen = |name: &String| {
        order.args.is_empty() || order.args.iter().any(|part| name.contains(part.as_str()))
    };
    Ok(all.iter().filter(|name| !is_ignored(name) && is_chosen(name)).cloned().collect())
}

fn list(program: &Program, words: &[&str]) -> anyhow::Result<Vec<String>> {
    let listed = Cmd::new(&program.file).args(words.iter().copied()).output(&program.folder)?;
    let listed = listed.map_err(|error| anyhow::anyhow!("{}: {error}", program.name()))?;
    Ok(listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Returns the programs of the packages that every Debian system has, or `None` without dpkg.
fn programs_of_every_system() -> anyhow::Result<Option<Vec<PathBuf>>> {
    let query = Cmd::new("dpkg-query").args(["--show", "--showformat=${Priority} ${Package}\n"]);
    let Ok(Ok(packages)) = query.output(Path::new("/")) else { return Ok(None) };
    let names = packages.lines().filter_map(|line| line.strip_prefix("required "));
    let files = Cmd::new("dpkg-query").args(["--listfiles"]).args(names);
    let files = files.output(Path::new("/"))?.map_err(|error| anyhow::anyhow!("dpkg: {error}"))?;
    let alternatives = ALTERNATIVES.map(|name| format!("/usr/bin/{name}"));
    let is_program = |path: &&Path| {
        let place = path.parent().and_then(Path::file_name);
        place.is_some_and(|name| name == "bin" || name == "sbin") && path.is_file()
    };
    let all = files.lines().chain(alternatives.iter().map(String::as_str)).map(Path::new);
    Ok(Some(all.filter(is_program).map(Path::to_owned).collect()))
}

/// Directories of programs, which end with this value: one for all tests, and one for each.
struct Paths(PathBuf);

impl Paths {
    fn new(base: &[PathBuf]) -> anyhow::Result<Paths> {
        // Guests and ordinary users must see it, and tests mount over /tmp.
        let folder = Path::new("/var/tmp").join(format!("ringfence-path-{}", std::process::id()));
        std::fs::create_dir(&folder)?;
        let paths = Paths(folder);
        open(&paths.0)?;
        std::fs::create_dir(paths.base())?;
        open(&paths.base())?;
        for program in base {
            let name = program.file_name().context("a program has a name")?;
            // Packages may provide a program twice, as /bin and /usr/bin.
            let _ = symlink(program, paths.base().join(name));
        }
        Ok(paths)
    }

    fn base(&self) -> PathBuf {
        self.0.join("base")
    }

    /// Creates an empty directory. Returns the PATH of it and the common one.
    fn next(&self, number: usize) -> anyhow::Result<OsString> {
        let own = self.0.join(number.to_string());
        std::fs::create_dir(&own)?;
        // Tests that become an ordinary user ask as that user.
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o1777))?;
        Ok(std::env::join_paths([own, self.base()])?)
    }
}

impl Drop for Paths {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            println!("{}: {error}", self.0.display());
        }
    }
}

fn open(folder: &Path) -> anyhow::Result<()> {
    Ok(std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755))?)
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn programs_of_every_system_have_a_shell_and_none_that_tests_ask_for() {
        let Some(programs) = programs_of_every_system().unwrap() else { return };
        let has = |name: &str| programs.iter().any(|path| path.ends_with(name));
        assert!(has("sh") && has("mount") && has("unshare") && has("awk"), "{programs:?}");
        assert!(!has("python3") && !has("ip") && !has("curl"), "{programs:?}");
    }

    #[test]
    fn directories_end_with_their_value() {
        let paths = Paths::new(&["/bin/sh".into()]).unwrap();
        let path = paths.next(0).unwrap();
        let places: Vec<PathBuf> = std::env::split_paths(&path).collect();
        assert!(places[0].is_dir() && places[1].join("sh").is_file());
        drop(paths);
        assert!(!places[0].exists() && !places[1].exists());
    }
}
