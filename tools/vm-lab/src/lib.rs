#![forbid(unsafe_code)]
//! Tests on whole machines under emulation, for code that needs its own kernel or hypervisor: `cargo xtask vm` and, for
//! hypervisors with grant windows, `cargo xtask xen`. `vm/README.md` explains how to write a scenario.
//!
//! The command line (`args`) selects scenarios and a hypervisor (`choice`), which make the settings of a run (`setting`).
//! The images come from Debian's packages (`images`, `apt`, `kernel`, `cpio`); each boot appends the
//! project's files (`overlay`, `program`). A machine (`machine`) runs several scenarios ([`scenario`]) one
//! after the other. The result of each comes from inside the machine ([`results`]). A machine that crashes fails
//! the running scenario, and a new machine runs the remaining ones (`boots`).

mod apt;
mod args;
mod boots;
pub mod build;
mod choice;
mod complaints;
mod cpio;
mod debug_kernel;
mod driver_domain;
mod emulator;
mod guest_driver;
mod hypervisor;
mod images;
mod iommufd;
mod kernel;
mod lent_pool;
mod machine;
mod modes;
mod module;
mod newest_kernel;
mod overlay;
mod parts;
mod program;
mod report;
pub mod results;
pub mod scenario;
mod selftests;
mod setting;
mod toolchain;
mod unavailable;
mod window_driver;
pub mod window_xen;

use std::path::Path;
use std::time::Instant;

use taskkit::tools::{self, Tool, Toolbox};

use args::{ModulesArgs, Suite};
use boots::Boots;
use build::BuildTools;
use choice::Choice;
use machine::{Kind, Machine};
use overlay::Orders;
use program::{Extent, ProgramSelection};
use scenario::{Scenario, Set};
use setting::{Setting, add_driver_parts, prepare};

pub use args::VmArgs;
pub use unavailable::Unavailable;

/// Tools that must be installed. All other programs are downloaded and unpacked.
pub static NEEDS: &[&Tool] = &[&tools::QEMU, &tools::XZ, &tools::ZSTD];

/// Runs `cargo xtask vm`. Returns `false` if a scenario failed.
pub fn run(args: &VmArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let (suite, kinds, args, hypervisor) = match &args.suite {
        Suite::Xen(args) => ("xen", Kind::XEN, &args.common, Choice::of(args)?),
        Suite::Linux(args) => ("linux", Kind::LINUX, &args.common, Choice::of_linux(args)?),
        Suite::Modules(args) => return compile_modules(args, root, target),
    };
    let found = scenario::find(&root.join("vm").join(suite).join("scenarios"), kinds)?;
    if args.list {
        print!("{}", report::listing(&found));
        return Ok(true);
    }
    let set = if args.all { Set::All } else { Set::Core };
    let mut selected = match (args.shell, args.scenarios.is_empty()) {
        (true, true) => vec![],
        _ => scenario::select(&found, &args.scenarios, set, hypervisor.debug)?,
    };
    let release = hypervisor.release;
    if release.is_some() {
        selected = scenario::of_other_release(selected, !args.scenarios.is_empty())?;
    }
    let toolbox = Toolbox::new(root, target);
    let tools = BuildTools { toolbox: &toolbox, may_install: !args.no_install };
    tools.require(NEEDS)?;
    let cache = args.cache.clone().unwrap_or_else(|| target.join("vm"));
    let cache = std::path::absolute(cache)?;
    let emulator = hypervisor.emulator.map(|release| emulator::folder(release, &cache));
    let emulator = emulator.transpose()?;
    let cache = release.map_or(cache.clone(), |release| release.folder(&cache));
    selected.iter_mut().for_each(|scenario| scenario.options += &hypervisor.options());
    let hypervisor = hypervisor.elf(root, &cache, tools, &selected)?;
    let programs = ProgramSelection { extent: Extent::Full, given: args.program.as_deref() };
    let mut setting = prepare(root, target, release, &cache, &toolbox, programs, &selected)?;
    setting.hypervisor = hypervisor;
    if let Some(scripts) = emulator {
        let folders = std::iter::once(scripts).chain(std::env::split_paths(&setting.path));
        setting.path = std::env::join_paths(folders)?;
    }
    if selected.iter().any(|scenario| scenario.machine == Kind::LinuxIommufd) {
        setting.iommufd = Some(iommufd::kernel(&cache, tools)?);
    }
    add_driver_parts(&mut setting, &selected, release, &cache, tools)?;
    setting.patience = args.patience;
    setting.processors = args.processors;
    setting.counts_instructions = args.count_instructions;
    setting.variables.clone_from(&args.variables);
    setting.verbose = args.verbose;
    if args.shell {
        let kind = selected.first().map_or(kinds[0], |scenario| scenario.machine);
        return shell(&setting, kind, &selected).map(|()| true);
    }
    let start = Instant::now();
    let tallies = Boots::new(&setting, selected).run(args.machines)?;
    println!("{}", report::summary(&tallies, start.elapsed()));
    Ok(tallies.iter().all(|tally| tally.failures().is_empty()))
}

/// Runs `cargo xtask vm modules`.
fn compile_modules(args: &ModulesArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let cache = args.cache.clone().unwrap_or_else(|| target.join("vm"));
    let (cache, toolbox) = (std::path::absolute(cache)?, Toolbox::new(root, target));
    let tools = BuildTools { toolbox: &toolbox, may_install: !args.no_install };
    module::compile_all(root, &cache, tools).map(|()| true)
}

/// Parts of the core scenarios that `cargo xtask test` runs at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CorePart {
    /// The scenarios of the default set.
    Short,
    /// All others on Xen.
    Xen,
    /// All others on a plain kernel.
    Linux,
}

/// Suites and names of the scenarios that show within minutes that each kind of machine works. They use no programs but those
/// of [`Extent::Short`].
const SHORT: [(&str, &str); 4] =
    [("xen", "hello"), ("xen", "net"), ("xen", "disk"), ("linux", "hello")];

/// Returns the core scenarios of a part.
fn scenarios_of(root: &Path, part: CorePart) -> anyhow::Result<Vec<Scenario>> {
    let mut selected = vec![];
    for (suite, kinds, rest) in
        [("xen", Kind::XEN, CorePart::Xen), ("linux", Kind::LINUX, CorePart::Linux)]
    {
        let found = scenario::find(&root.join("vm").join(suite).join("scenarios"), kinds)?;
        let core = scenario::select(&found, &[], Set::Core, false)?;
        let is_short = |name: &str| SHORT.contains(&(suite, name));
        selected.extend(core.into_iter().filter(|scenario| {
            if is_short(&scenario.name) { part == CorePart::Short } else { part == rest }
        }));
    }
    Ok(selected)
}

/// Runs a part of the core scenarios for `cargo xtask test`. Returns the summary, or the failures.
pub fn core(
    root: &Path,
    target: &Path,
    toolbox: &Toolbox,
    part: CorePart,
) -> anyhow::Result<Result<String, String>> {
    let selected = scenarios_of(root, part)?;
    anyhow::ensure!(!selected.is_empty(), "no scenario is of this part of the core set");
    let extent = if part == CorePart::Short { Extent::Short } else { Extent::Full };
    let cache = target.join("vm");
    let programs = ProgramSelection { extent, given: None };
    let setting = prepare(root, target, None, &cache, toolbox, programs, &selected)?;
    let start = Instant::now();
    let tallies = Boots::new(&setting, selected).run(2)?;
    let note = report::summary(&tallies, start.elapsed());
    let failed = tallies.iter().filter(|tally| !tally.failures().is_empty());
    let failed: Vec<&str> = failed.map(|tally| tally.name.as_str()).collect();
    println!("{note}");
    Ok(if failed.is_empty() { Ok(note) } else { Err(format!("{}: {note}", failed.join(", "))) })
}

/// Runs a machine on this process's terminal.
fn shell(setting: &Setting<'_>, kind: Kind, selected: &[Scenario]) -> anyhow::Result<()> {
    let share = setting.folder.join("shell");
    std::fs::create_dir_all(&share)?;
    let orders = Orders {
        scenarios: selected.iter().map(|s| (s.name.as_str(), s.limit)).collect(),
        patience: setting.patience,
        shell: true,
        debug: setting.hypervisor.is_some(),
        variables: &setting.variables,
        target: setting.target,
        tests: &setting.programs.tests,
    };
    let root = setting.folder.join("shell.cpio");
    overlay::write(&root, kind, &setting.images, setting.root, &setting.programs, &orders)?;
    println!("`poweroff -f` ends it, and so does C-a x; {} is /share inside", share.display());
    let machine = Machine {
        kind,
        images: &setting.images,
        repository: setting.root,
        programs: &setting.programs,
        root,
        hypervisor: setting.hypervisor.clone(),
        options: selected.first().map_or("", |scenario| scenario.options.as_str()),
        iommufd: setting.iommufd.as_deref(),
        // The monitor of a machine with a shell is on the console.
        sampled: false,
        counts_instructions: setting.counts_instructions,
        processors: setting.processors,
        share,
        console: None,
        path: setting.path.clone(),
    };
    machine.start()?.wait_for_ever()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_core_scenarios_are_disjoint_and_complete() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let names = |part| -> Vec<String> {
            let found = scenarios_of(&root, part).unwrap();
            found
                .into_iter()
                .map(|scenario| format!("{:?} {}", scenario.machine, scenario.name))
                .collect()
        };
        let parts = [CorePart::Short, CorePart::Xen, CorePart::Linux].map(names);
        assert_eq!(parts[0].len(), SHORT.len());
        let mut all = parts.concat();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        let core = |suite: &str, kinds| {
            let found =
                scenario::find(&root.join("vm").join(suite).join("scenarios"), kinds).unwrap();
            scenario::select(&found, &[], Set::Core, false).unwrap().len()
        };
        assert_eq!(count, core("xen", Kind::XEN) + core("linux", Kind::LINUX));
    }
}
