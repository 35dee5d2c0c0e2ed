//! `cargo xtask package`: Debian packages of the program and of the two kernel modules.
//!
//! | package | content |
//! |---|---|
//! | `ringfence` | the program, manual pages, completions, guides, the daemon's unit, configuration and hotplug scripts |
//! | `ringfence-netfront-dkms` | source of the guest network driver, built for each kernel by DKMS |
//! | `ringfence-window-dkms` | source of the device of grant windows, likewise |
//!
//! The hypervisor's package is that of `cargo xtask xen package`. Two builds in different folders have equal bytes. `--try`
//! checks the packages by lintian(1), and installs, uses, upgrades and removes them in systems of their own
//! (`dist/debian/try.sh`).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use taskkit::deb::{Control, Deb, epoch, workspace_version};
use taskkit::exec::Cmd;
use taskkit::text::{count, duration};
use taskkit::tools::{self, Tool, Toolbox};
use vm_lab::results::{self, Line, Tally};

use crate::contents;
use crate::new_system::{self, BOOKWORM, Extent, NOBLE, System, TRIXIE};
use crate::product::{self, Form};

/// Tools that must be installed for `--try`.
static NEEDS: &[&Tool] = &[&tools::DEBOOTSTRAP];

/// Trial of packages in systems of their own.
pub(crate) struct Trial {
    /// Script below the root, with the checks.
    pub(crate) script: &'static str,
    pub(crate) systems: &'static [&'static System],
    /// Packages of the systems: what ours depend on, and what the checks use.
    pub(crate) packages: &'static [&'static str],
    /// Set if modules are built, which needs the headers of the systems' kernels.
    pub(crate) has_modules: bool,
}

/// Trial of the Debian packages.
const TRIAL: Trial = Trial {
    script: "dist/debian/try.sh",
    systems: &[&BOOKWORM, &TRIXIE, &NOBLE],
    packages: &[
        "curl",
        "dkms",
        "fish",
        "iproute2",
        "libnbd-bin",
        "man-db",
        "procps",
        "python3",
        "tmux",
        "zsh",
    ],
    has_modules: true,
};

/// Time limit of one system, in seconds.
const LIMIT: u32 = 1200;

const COPYRIGHT: &str = "Ringfence. Licence: Apache-2.0 or MIT, as you choose.\n\
     /usr/share/common-licenses/Apache-2.0 has the former; the latter:\n\n";

const COPYRIGHT_GPL: &str = "A part of Ringfence.\n\
     Copyright (c) 2026 The Ringfence developers. Licence: GPL-2.0-only.\n\
     /usr/share/common-licenses/GPL-2 has the licence.\n";

/// Arguments of `cargo xtask package`.
#[derive(Args)]
pub(crate) struct PackageArgs {
    /// Install, use, upgrade and remove the packages in systems of their own (needs root, debootstrap and a network)
    #[arg(long)]
    r#try: bool,
    /// Program to pack, in place of one that is built now; it uses the libraries of the system
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Directory for the packages; by default `package` in the target directory
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

/// Runs `cargo xtask package`. Returns `false` if a package failed its trial.
pub(crate) fn run(args: &PackageArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let folder = args.output.clone().unwrap_or_else(|| target.join("package"));
    let folder = std::path::absolute(folder)?;
    std::fs::create_dir_all(&folder)?;
    let program = match &args.program {
        Some(file) => std::path::absolute(file)?,
        None => product::build(root, target, Form::Dynamic)?,
    };
    let packages = make(root, &program, &folder)?;
    for package in &packages {
        println!("{}", package.display());
    }
    if !args.r#try {
        return Ok(true);
    }
    let options = ["--allow-root", "--fail-on", "error"].map(OsStr::new);
    let is_clean = lint(root, "lintian", &tools::LINTIAN, &options, &packages)?;
    Ok(try_all(&TRIAL, root, target, &folder)? && is_clean)
}

/// Makes all packages in `folder`. Returns their paths.
pub(crate) fn make(root: &Path, program: &Path, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    Ok(vec![
        main_package(root, program, folder)?,
        module_package(root, &NETFRONT, folder)?,
        module_package(root, &WINDOW, folder)?,
    ])
}

/// Checks packages by a program that exits with an error after one. Returns `false` then, and `true` if it is not installed.
pub(crate) fn lint(
    root: &Path,
    program: &str,
    tool: &'static Tool,
    options: &[&OsStr],
    packages: &[impl AsRef<OsStr>],
) -> anyhow::Result<bool> {
    if !Cmd::new(program).args(["--version"]).probe() {
        println!("SKIPPED: {program} ({})", tools::how_to_get(&[tool]));
        return Ok(true);
    }
    Ok(Cmd::new(program).args(options).args(packages).run(root)?)
}

/// Installs, uses and removes the packages of `folder` in each system of a trial. Returns `false` if a check failed.
pub(crate) fn try_all(
    trial: &Trial,
    root: &Path,
    target: &Path,
    folder: &Path,
) -> anyhow::Result<bool> {
    let toolbox = Toolbox::new(root, target);
    anyhow::ensure!(
        toolbox.is_root,
        "the trial needs root: it installs packages in systems of its own"
    );
    toolbox.install(&toolbox.missing(NEEDS))?;
    let missing = toolbox.missing(NEEDS);
    anyhow::ensure!(missing.is_empty(), "{}", tools::how_to_get(&missing));
    let mut is_good = true;
    for system in trial.systems {
        if let Some(why) = system.unreachable() {
            println!("SKIPPED: {}: {why}", system.release);
            continue;
        }
        is_good &= try_in(trial, system, root, folder, &toolbox)?;
    }
    Ok(is_good)
}

fn main_package(root: &Path, program: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let mut deb = Deb::new(folder.join("ringfence"))?;
    let bytes = std::fs::read(program).with_context(|| program.display().to_string())?;
    let glibc = newest_glibc(&bytes).context("the program names no version of glibc")?;
    deb.add("usr/bin/ringfence", 0o755, &bytes)?;
    // Most of the file are names for debuggers.
    let strip = Cmd::new("strip")
        .args(["--strip-all".as_ref(), deb.place("usr/bin/ringfence")?.as_os_str()]);
    strip.output(folder)?.map_err(|message| anyhow::anyhow!("strip: {message}"))?;
    for name in contents::NAMES {
        deb.link(&format!("usr/libexec/ringfence/{name}"), "../../bin/ringfence")?;
    }
    let dist = root.join("dist");
    contents::add_profiles(deb.tree(), "usr/share", root)?;
    for (name, path, mode) in contents::SYSTEM_FILES {
        deb.copy(path, *mode, &dist.join(name))?;
    }
    contents::add_generated(deb.tree(), "usr/share", program)?;
    contents::add_guides(deb.tree(), "usr/share", root)?;
    let licence = std::fs::read_to_string(root.join("LICENSE-MIT"))?;
    deb.add_copyright("ringfence", &format!("{COPYRIGHT}{licence}"))?;
    for script in ["postinst", "prerm", "postrm"] {
        deb.script(script, &std::fs::read_to_string(dist.join("debian").join(script))?)?;
    }
    let control = Control {
        name: "ringfence",
        version: &workspace_version(root)?,
        architecture: "amd64",
        section: "net",
        fields: &[
            ("Depends", &format!("libc6 (>= {glibc}), libgcc-s1")),
            ("Suggests", "ringfence-netfront-dkms, ringfence-window-dkms, xen-utils"),
        ],
        synopsis: "network interfaces and disks for guests that do not trust it",
        description: &[
            "Ringfence gives a command, a container, a virtual machine or a Xen guest",
            "network interfaces and disks over shared memory. It sees no more of a",
            "guest's memory than what the guest lends to it. It serves in place of",
            "pasta, passt and slirp4netns, and of Xen's netback and blkback.",
        ],
    };
    deb.build(&control, folder, epoch(root)?)
}

/// Returns the newest version of glibc whose symbols a program needs, such as `2.34`.
fn newest_glibc(program: &[u8]) -> Option<String> {
    const MARK: &[u8] = b"GLIBC_2.";
    let minor = |at: &[u8]| {
        let digits = at.strip_prefix(MARK)?.iter().copied().take_while(u8::is_ascii_digit);
        std::str::from_utf8(&digits.collect::<Vec<_>>()).ok()?.parse::<u32>().ok()
    };
    let newest = (0..program.len()).filter_map(|at| minor(&program[at..])).max()?;
    Some(format!("2.{newest}"))
}

/// Kernel module whose source is a package.
struct Module {
    name: &'static str,
    folder: &'static str,
    /// Files beside those of the folder, from the repository's root.
    further: &'static [&'static str],
    synopsis: &'static str,
    description: &'static [&'static str],
}

/// Headers of grant windows, which both modules include.
const WINDOW_HEADERS: &[&str] =
    &["linux/include/grant_window_calls.h", "xen/include/public/grant_window.h"];

const NETFRONT: Module = Module {
    name: "ringfence-netfront",
    folder: "linux/netfront",
    further: WINDOW_HEADERS,
    synopsis: "network driver for Xen guests, with grant windows and staging grants (DKMS)",
    description: &[
        "The module takes the place of xen-netfront in a Xen guest. At a backend that",
        "has grant windows or staging grants, no packet costs the backend a grant",
        "operation.",
    ],
};

const WINDOW: Module = Module {
    name: "ringfence-window",
    folder: "linux/grant-window",
    further: WINDOW_HEADERS,
    synopsis: "device of Xen's grant windows (DKMS)",
    description: &[
        "The module provides /dev/ringfence-window, for a guest that lends pages by",
        "grant windows and for a driver domain that uses them. It needs a hypervisor",
        "with grant windows.",
    ],
};

/// Makes the package of a module's source, which DKMS builds for each kernel.
fn module_package(root: &Path, module: &Module, folder: &Path) -> anyhow::Result<PathBuf> {
    let sources = root.join(module.folder);
    let settings = std::fs::read_to_string(sources.join("dkms.conf"))?;
    let version = dkms_version(&settings).context("dkms.conf has no PACKAGE_VERSION")?;
    let name = format!("{}-dkms", module.name);
    let mut deb = Deb::new(folder.join(&name))?;
    let place = format!("usr/src/{}-{version}", module.name);
    for entry in std::fs::read_dir(&sources)? {
        let path = entry?.path();
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // A build in place leaves `NAME.mod.c` beside the sources.
        let is_source =
            [".c", ".h"].iter().any(|end| file.ends_with(end)) && !file.ends_with(".mod.c");
        if is_source || ["Kbuild", "Makefile", "dkms.conf"].contains(&file) {
            deb.copy(&format!("{place}/{file}"), 0o644, &path)?;
        }
    }
    for path in module.further {
        let file = path.rsplit('/').next().unwrap_or(path);
        deb.copy(&format!("{place}/{file}"), 0o644, &root.join(path))?;
    }
    deb.add_copyright(&name, COPYRIGHT_GPL)?;
    for script in ["postinst", "prerm"] {
        let text = std::fs::read_to_string(root.join(format!("dist/debian/dkms-{script}")))?;
        deb.script(script, &text.replace("@NAME@", module.name).replace("@VERSION@", version))?;
    }
    let control = Control {
        name: &name,
        version,
        architecture: "all",
        section: "kernel",
        fields: &[("Depends", "dkms"), ("Recommends", "linux-headers-amd64 | linux-headers")],
        synopsis: module.synopsis,
        description: module.description,
    };
    deb.build(&control, folder, epoch(root)?)
}

/// Returns the version that a `dkms.conf` declares.
fn dkms_version(settings: &str) -> Option<&str> {
    let line = settings.lines().find_map(|line| line.strip_prefix("PACKAGE_VERSION="))?;
    Some(line.trim_matches('"'))
}

/// Runs the checks of a trial in a system. Returns `false` if a check failed.
fn try_in(
    trial: &Trial,
    system: &System,
    root: &Path,
    folder: &Path,
    toolbox: &Toolbox,
) -> anyhow::Result<bool> {
    let release = system.release;
    let place = folder.join("systems").join(release);
    // The last file that is made: a system without it was interrupted.
    let complete = folder.join("systems").join(format!("{release}.complete"));
    let mut packages = trial.packages.to_vec();
    packages.extend(trial.has_modules.then_some(system.headers));
    let wanted = packages.join("\n");
    if !std::fs::read_to_string(&complete).is_ok_and(|made| made == wanted) {
        new_system::install(&place, system, Extent::Minimal, &packages, toolbox)?;
        std::fs::write(&complete, wanted)?;
    }
    let (results, log) =
        (folder.join(format!("{release}.results")), folder.join(format!("{release}.log")));
    std::fs::write(&results, "")?;
    let limit = LIMIT.to_string();
    let start = Instant::now();
    let status = Cmd::new("timeout")
        .args([
            "-s",
            "KILL",
            &limit,
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
        ])
        .args(["sh".as_ref(), root.join(trial.script).as_os_str()])
        .args([place.as_os_str(), folder.as_os_str(), results.as_os_str()])
        .run_to_file(root, &log)?;
    let mut tally = Tally::new(release);
    for line in std::fs::read_to_string(&results)?.lines() {
        tally.take(&results::read(line));
    }
    tally.take(&Line::End(release.to_owned(), status));
    let failures = tally.failures();
    let word = if failures.is_empty() { "passed" } else { "FAILED" };
    println!(
        "{word} {release}: {} in {}",
        count(tally.checks(), "check"),
        duration(start.elapsed())
    );
    for line in tally.notes.iter().chain(&failures) {
        println!("    {line}");
    }
    if !failures.is_empty() {
        println!("---- {}\n{}", log.display(), String::from_utf8_lossy(&std::fs::read(&log)?));
    }
    Ok(failures.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_glibc_is_compared_by_number() {
        let program = b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.2.5\0";
        assert_eq!(newest_glibc(program).as_deref(), Some("2.34"));
        assert_eq!(newest_glibc(b"GLIBC_"), None);
    }

    #[test]
    fn modules_of_the_repository_are_packed_with_their_sources() {
        if !taskkit::deb::is_possible() {
            return;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = std::env::temp_dir().join(format!("package-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (module, file) in [(&NETFRONT, "staging.c"), (&WINDOW, "grant_window.h")] {
            let package = module_package(root, module, &folder).unwrap();
            let list = Cmd::new("dpkg-deb").args(["--contents".as_ref(), package.as_os_str()]);
            let list = list.output(&folder).unwrap().unwrap();
            for wanted in [file, "Kbuild", "dkms.conf", "copyright"] {
                assert!(list.contains(wanted), "{wanted}: {list}");
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
