//! `cargo xtask vm`: tests on whole machines under emulation, for code that needs its own kernel or hypervisor.
//! `vm/README.md` explains how to write a scenario.
//!
//! The images come from Debian's packages ([`images`], [`apt`], [`kernel`], [`cpio`]); each boot appends the
//! project's files ([`overlay`], [`program`]). A machine ([`machine`]) runs several scenarios ([`scenario`]) one
//! after the other. The result of each comes from inside the machine ([`results`]). A machine that crashes fails
//! the running scenario, and a new machine runs the remaining ones ([`boots`]).

mod apt;
mod boots;
pub(crate) mod build;
mod cpio;
mod debug_kernel;
mod guest_driver;
mod hypervisor;
mod images;
mod iommufd;
mod kernel;
mod machine;
mod modes;
mod module;
mod newest_kernel;
mod overlay;
mod parts;
mod program;
mod report;
pub(crate) mod results;
pub(crate) mod scenario;
mod selftests;
mod toolchain;
mod window_driver;
pub(crate) mod window_xen;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand};
use taskkit::tools::{self, Tool, Toolbox};

use apt::Release;
use boots::Boots;
use machine::{Kind, Machine};
use overlay::Orders;
use parts::Part;
use program::Dom0Part;
use scenario::{Scenario, Set};
use window_xen::Variant;

/// Tools that must be installed. All other programs are downloaded and unpacked.
pub(crate) static NEEDS: &[&Tool] = &[&tools::QEMU, &tools::XZ, &tools::ZSTD];

/// Reason for which this computer cannot run the suite; reported as a skipped step.
#[derive(Debug)]
pub(crate) struct Unavailable(pub(crate) String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Arguments of `cargo xtask vm`.
#[derive(Args)]
pub(crate) struct VmArgs {
    #[command(subcommand)]
    suite: Suite,
}

#[derive(Subcommand)]
enum Suite {
    /// Xen, a dom0 and its guests
    Xen(XenArgs),
    /// A plain Linux kernel
    Linux(SuiteArgs),
    /// Compile the kernel modules of linux/ for the newest kernels of this Debian release and of its backports
    Modules(ModulesArgs),
}

#[derive(Args)]
struct ModulesArgs {
    /// Directory for packages; by default `vm` in the target directory
    #[arg(long, value_name = "FOLDER", env = "RINGFENCE_VM_CACHE")]
    cache: Option<PathBuf>,
    /// Install nothing
    #[arg(long)]
    no_install: bool,
}

#[derive(Args)]
struct XenArgs {
    #[command(flatten)]
    common: SuiteArgs,
    /// Debian release of Xen, its tools and the kernels; by default this computer's
    #[arg(long, value_enum)]
    suite: Option<Release>,
    /// Boot a debug build of the hypervisor, which names every bad grant on the console and counts grant
    /// operations; it is built from Debian's source first, which takes about a minute
    #[arg(long)]
    debug_xen: bool,
    /// Boot the hypervisor with grant windows (folder xen/) for every scenario, also those that need none
    #[arg(long)]
    window_xen: bool,
    /// Boot the hypervisor with grant windows without these guards, a sum of the numbers in xen/README.md; for trials of
    /// tests
    #[arg(long, value_name = "SUM", requires = "debug_xen")]
    without_guards: Option<u32>,
    /// Boot this hypervisor (its ELF file) instead of Debian's; with --debug-xen it is a debug build, and nothing is built
    #[arg(long, value_name = "FILE", conflicts_with_all = ["window_xen", "without_guards"])]
    hypervisor: Option<PathBuf>,
}

#[derive(Args)]
struct SuiteArgs {
    /// Run these scenarios instead of the core set
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,
    /// Run every scenario except those that only run by name
    #[arg(long)]
    all: bool,
    /// Print the scenarios, and run nothing
    #[arg(long)]
    list: bool,
    /// Boot, run the named scenarios if any, and start a shell on the console
    #[arg(long)]
    shell: bool,
    /// Use this statically linked `ringfence` instead of building one
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Multiply every time limit by this factor, for a busy or slow computer
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    patience: u32,
    /// Number of processors of a machine; with two, dom0 and guests run at the same time
    #[arg(long, value_name = "N", default_value_t = PROCESSORS, value_parser = clap::value_parser!(u32).range(1..=16))]
    processors: u32,
    /// Let an instruction take a nanosecond of the machine's time, so that processor time is a number of instructions.
    /// Machines have one processor then
    #[arg(long, conflicts_with = "processors")]
    count_instructions: bool,
    /// Number of machines that run at the same time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    machines: u32,
    /// Directory for packages and images; by default `vm` in the target directory
    #[arg(long, value_name = "FOLDER", env = "RINGFENCE_VM_CACHE")]
    cache: Option<PathBuf>,
    /// Set a variable of the scenarios, such as the length of a run
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_variable)]
    variables: Vec<String>,
    /// Print the scenarios' notes in addition to their checks
    #[arg(long, short)]
    verbose: bool,
    /// Install nothing
    #[arg(long)]
    no_install: bool,
}

/// Default number of processors of a machine. On a computer with two processors, two machines of one processor are
/// faster than one of two: emulated processors stop and wait for each other whenever one changes a mapping.
const PROCESSORS: u32 = 1;

/// State that all boots of a run share.
struct Setting<'a> {
    root: &'a Path,
    /// Cargo's target directory.
    target: &'a Path,
    images: images::Images,
    programs: program::Programs,
    /// Directory of this run, for root file systems and logs.
    folder: PathBuf,
    hypervisor: Option<PathBuf>,
    /// Path of the kernel with iommufd, if a machine boots it.
    iommufd: Option<PathBuf>,
    path: std::ffi::OsString,
    patience: u32,
    counts_instructions: bool,
    processors: u32,
    variables: Vec<String>,
    verbose: bool,
}

/// Accepts a variable and a value that the shell takes as they are.
fn parse_variable(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.,:/-".contains(c);
    match text.split_once('=') {
        Some((name, value))
            if name.starts_with(|c: char| c.is_ascii_uppercase())
                && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                && value.chars().all(plain) =>
        {
            Ok(text.to_owned())
        }
        _ => Err("NAME=VALUE, with a name of A-Z and _, and a value without blanks".to_owned()),
    }
}

/// Runs `cargo xtask vm`. Returns `false` if a scenario failed.
pub(crate) fn run(args: &VmArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let (suite, kinds, args, hypervisor) = match &args.suite {
        Suite::Xen(args) => ("xen", Kind::XEN, &args.common, Choice::of(args)?),
        Suite::Linux(args) => ("linux", Kind::LINUX, args, Choice::default()),
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
    let mut missing = toolbox.missing(NEEDS);
    if !missing.is_empty() && !args.no_install {
        toolbox.install(&missing)?;
        missing = toolbox.missing(NEEDS);
    }
    anyhow::ensure!(missing.is_empty(), "{}", tools::how_to_get(&missing));
    let cache = args.cache.clone().unwrap_or_else(|| target.join("vm"));
    let cache = std::path::absolute(cache)?;
    let cache = release.map_or(cache.clone(), |release| release.folder(&cache));
    selected.iter_mut().for_each(|scenario| scenario.options += &hypervisor.options());
    let hypervisor = hypervisor.elf(root, &cache, &toolbox, !args.no_install, &selected)?;
    let mut setting =
        prepare(root, target, release, &cache, &toolbox, args.program.as_deref(), &selected)?;
    setting.hypervisor = hypervisor;
    if selected.iter().any(|scenario| scenario.machine == Kind::LinuxIommufd) {
        setting.iommufd = Some(iommufd::kernel(&cache, &toolbox, !args.no_install)?);
    }
    add_driver_parts(&mut setting, &selected, release, &cache, (&toolbox, !args.no_install))?;
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

/// Adds the parts of root file systems with the kernel modules and kernels that scenarios want. Each is built below `cache`
/// unless it is there.
fn add_driver_parts(
    setting: &mut Setting<'_>,
    selected: &[Scenario],
    release: Option<Release>,
    cache: &Path,
    (toolbox, may_install): (&Toolbox, bool),
) -> anyhow::Result<()> {
    let (root, images) = (setting.root, &setting.images);
    let wants = |part: fn(&Scenario) -> bool| selected.iter().any(part);
    if wants(|scenario| scenario.wants_driver) {
        let driver = guest_driver::archive(release, root, images, cache, toolbox, may_install)?;
        setting.programs.guest_driver = Some(driver);
    }
    if wants(|scenario| scenario.wants_windows) {
        let tests = wants(|scenario| scenario.wants_window_tests);
        let archives =
            window_driver::archives(root, images, cache, toolbox, (release, may_install))?;
        setting.programs.window_driver = Some(archives.driver);
        setting.programs.window_tests = tests.then_some(archives.tests);
    }
    let parts = &mut setting.programs.dom0_parts;
    let mut add = |wants: &dyn Fn(&Scenario) -> bool,
                   make: &dyn Fn() -> anyhow::Result<PathBuf>|
     -> anyhow::Result<()> {
        let wanting = selected.iter().filter(|scenario| wants(scenario));
        let scenarios: Vec<String> = wanting.map(|scenario| scenario.name.clone()).collect();
        if !scenarios.is_empty() {
            parts.push(Dom0Part { file: make()?, scenarios });
        }
        Ok(())
    };
    add(&|scenario| scenario.wants_newest_kernel, &|| {
        newest_kernel::archive(root, cache, toolbox, may_install)
    })?;
    add(&|scenario| scenario.wants_debug_kernel, &|| {
        debug_kernel::archive(root, images, cache, toolbox, may_install)
    })?;
    for part in Part::ALL {
        add(&|scenario| scenario.parts.contains(&part), &|| {
            part.archive(release, images, cache, toolbox, may_install)
        })?;
    }
    Ok(())
}

/// Hypervisor that the user chose.
#[derive(Default)]
struct Choice {
    file: Option<PathBuf>,
    /// Debian release that is not this computer's.
    release: Option<Release>,
    debug: bool,
    /// Set for the one with grant windows.
    windows: bool,
    /// Guards of grant windows that are taken out.
    without: Option<u32>,
}

impl Choice {
    fn of(args: &XenArgs) -> anyhow::Result<Choice> {
        Ok(Choice {
            file: args.hypervisor.clone(),
            release: args.suite.map(Release::other).transpose()?.flatten(),
            debug: args.debug_xen,
            windows: args.window_xen || args.without_guards.is_some(),
            without: args.without_guards,
        })
    }

    /// Returns words for the command line of the hypervisor.
    fn options(&self) -> String {
        self.without.map(|sum| format!(" window_without={sum}")).unwrap_or_default()
    }

    /// Returns the ELF file for these scenarios, built if it has to be; `None` for Debian's.
    fn elf(
        self,
        root: &Path,
        cache: &Path,
        toolbox: &Toolbox,
        may_install: bool,
        selected: &[Scenario],
    ) -> anyhow::Result<Option<PathBuf>> {
        if let Some(file) = self.file {
            return Ok(Some(std::path::absolute(file)?));
        }
        if let Some(scenario) = selected.iter().find(|scenario| scenario.wants_guards) {
            let name = &scenario.name;
            anyhow::ensure!(
                self.without.is_some(),
                "{name} runs with --without-guards only; 0 takes none out"
            );
        }
        if self.windows || selected.iter().any(|scenario| scenario.wants_windows) {
            let variant = match (self.without, self.debug) {
                (Some(_), _) => Variant::Guards,
                (None, true) => Variant::Debug,
                (None, false) => Variant::Release,
            };
            let making = (variant, may_install);
            return window_xen::elf(root, self.release, cache, toolbox, making).map(Some);
        }
        self.debug.then(|| hypervisor::debug(self.release, cache, toolbox, may_install)).transpose()
    }
}

/// Runs `cargo xtask vm modules`.
fn compile_modules(args: &ModulesArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let cache = args.cache.clone().unwrap_or_else(|| target.join("vm"));
    let (cache, toolbox) = (std::path::absolute(cache)?, Toolbox::new(root, target));
    module::compile_all(root, &cache, &toolbox, !args.no_install).map(|()| true)
}

/// Runs the core scenarios of both suites for `cargo xtask test`. Returns the summary, or the failures.
pub(crate) fn core(
    root: &Path,
    target: &Path,
    toolbox: &Toolbox,
) -> anyhow::Result<Result<String, String>> {
    let mut selected = vec![];
    for (suite, kinds) in [("xen", Kind::XEN), ("linux", Kind::LINUX)] {
        let found = scenario::find(&root.join("vm").join(suite).join("scenarios"), kinds)?;
        selected.extend(scenario::select(&found, &[], Set::Core, false)?);
    }
    anyhow::ensure!(!selected.is_empty(), "no scenario is of the core set");
    let setting = prepare(root, target, None, &target.join("vm"), toolbox, None, &selected)?;
    let start = Instant::now();
    let tallies = Boots::new(&setting, selected).run(2)?;
    let note = report::summary(&tallies, start.elapsed());
    let failed = tallies.iter().filter(|tally| !tally.failures().is_empty());
    let failed: Vec<&str> = failed.map(|tally| tally.name.as_str()).collect();
    println!("{note}");
    Ok(if failed.is_empty() { Ok(note) } else { Err(format!("{}: {note}", failed.join(", "))) })
}

/// Prepares images, programs and a directory for a run of these scenarios.
fn prepare<'a>(
    root: &'a Path,
    target: &'a Path,
    release: Option<Release>,
    cache: &Path,
    toolbox: &Toolbox,
    program: Option<&Path>,
    selected: &[Scenario],
) -> anyhow::Result<Setting<'a>> {
    if !cfg!(target_arch = "x86_64") {
        return Err(
            Unavailable("the machines are x86_64, as is the program in them".to_owned()).into()
        );
    }
    let images = images::prepare(release, cache, toolbox)?;
    let tests = selected.iter().flat_map(|scenario| &scenario.tests).map(String::as_str).collect();
    let programs = program::build(root, target, program, &tests)?;
    Ok(Setting {
        root,
        target,
        images,
        programs,
        folder: boots::new_folder(&target.join("vm/runs"))?,
        hypervisor: None,
        iommufd: None,
        path: toolbox.path().clone(),
        patience: 4,
        counts_instructions: false,
        processors: PROCESSORS,
        variables: vec![],
        verbose: false,
    })
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
