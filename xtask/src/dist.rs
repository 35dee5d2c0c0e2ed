//! `cargo xtask dist`: packages and archives of the program for each kind of system, in a form that is the same for each build.
//!
//! | file | content |
//! |---|---|
//! | `ringfence-VERSION-x86_64-linux.tar.xz` | the static program, manual pages, completions, guides, unit, profiles, licences |
//! | `ringfence-VERSION-x86_64-linux-debug.tar.xz` | names and lines of the program, for debuggers |
//! | `ringfence-VERSION-1.x86_64.rpm` | package for systems with RPM, if rpmbuild is installed |
//! | `ringfence-selinux-VERSION-1.x86_64.rpm` | SELinux policy, if checkmodule and semodule_package are installed |
//! | `ringfence-VERSION-1-x86_64.pkg.tar.zst` | package for Arch Linux |
//! | `ringfence-VERSION-py3-none-….whl` | wheel for Python's package index |
//! | `ringfence_VERSION_amd64.deb`, `…-dkms_VERSION_all.deb` | Debian packages ([`package`]), if dpkg-deb is installed |
//! | `ringfence-VERSION.cdx.json` | bill of materials (CycloneDX) |
//! | `NAME-VERSION.crate` | with `--crates`: the published crates |
//! | `SHA256SUMS` | checksums of these files |
//!
//! Files have the time in `SOURCE_DATE_EPOCH`, or that of the last commit. Paths of this computer are replaced in the
//! program ([`product`]), so two builds in different folders have equal bytes.
//!
//! `--try` also makes packages of an older version (`older/`), from which the trial upgrades.

mod arch;
mod archive;
mod dependencies;
mod licences;
mod rpm;
mod sbom;
mod system;
mod wheel;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use taskkit::deb::{epoch, workspace_version};
use taskkit::exec::Cmd;
use taskkit::tree::Tree;

use crate::contents;
use crate::new_system::{BOOKWORM, NOBLE, TRIXIE};
use crate::package::{self, Trial};
use crate::packages::published;
use crate::product::{self, Form};
use dependencies::Component;
use system::SystemPackage;
use wheel::Wheel;

/// Arguments of `cargo xtask dist`.
#[derive(Args)]
pub(crate) struct DistArgs {
    /// Static program to pack, in place of one that is built now; without Debian packages, which have another
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Also pack the crates for a registry, from which `cargo install ringfence` takes them
    #[arg(long)]
    crates: bool,
    /// Install, use, upgrade and remove the archives in systems of their own (needs root, debootstrap and a network)
    #[arg(long)]
    r#try: bool,
    /// Directory for the archives; by default `dist` in the target directory
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

/// Runs `cargo xtask dist`.
pub(crate) fn run(args: &DistArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let folder = args.output.clone().unwrap_or_else(|| target.join("dist"));
    let folder = std::path::absolute(folder)?;
    std::fs::create_dir_all(&folder)?;
    let program = match &args.program {
        Some(file) => std::path::absolute(file)?,
        None => product::build(root, target, Form::Static)?,
    };
    let epoch = epoch(root)?;
    let rust = rust_version(root)?;
    let components = dependencies::of_program(root)?;
    let mut further = if args.crates { pack_crates(root, target, &folder)? } else { Vec::new() };
    if args.program.is_none() && taskkit::deb::is_possible() {
        let program = product::build(root, target, Form::Dynamic)?;
        further.extend(package::make(root, &program, &folder)?);
    }
    let dist = Dist { root, components, further, rust, epoch };
    let made = dist.pack(&program, &folder)?;
    made.iter().for_each(|file| println!("{}", file.display()));
    if !args.r#try {
        return Ok(true);
    }
    let is_clean = rpm::lint(root, &made)?;
    dist.pack_older(&program, &folder.join("older"))?;
    Ok(package::try_all(&TRIAL, root, target, &folder)? && is_clean)
}

/// Version from which a trial upgrades.
const OLDER: &str = "0.0.1";

/// Trial of the archives. The system has the programs that install each of them.
const TRIAL: Trial = Trial {
    script: "dist/debian/try-archives.sh",
    systems: &[&BOOKWORM, &TRIXIE, &NOBLE],
    packages: &[
        "curl",
        "dnf",
        "fish",
        "iproute2",
        "libnbd-bin",
        "man-db",
        "pacman-package-manager",
        "procps",
        "python3-venv",
        "rpm",
        "tmux",
        "xz-utils",
        "zsh",
        "zstd",
    ],
    has_modules: false,
};

/// Packs the published crates in `folder`, without a build of each. Returns their paths.
pub(crate) fn pack_crates(
    root: &Path,
    target: &Path,
    folder: &Path,
) -> anyhow::Result<Vec<PathBuf>> {
    let mut command = Cmd::cargo().args(["package", "--locked", "--no-verify", "--quiet"]);
    let names = published(root)?;
    for name in &names {
        command = command.args(["--package", name]);
    }
    let packed = command.env("CARGO_TARGET_DIR", target).run(root)?;
    anyhow::ensure!(packed, "the crates were not packed; each file must be committed");
    let version = workspace_version(root)?;
    let mut made = Vec::new();
    for name in names {
        let file = format!("{name}-{version}.crate");
        let from = target.join("package").join(&file);
        std::fs::copy(&from, folder.join(&file)).with_context(|| from.display().to_string())?;
        made.push(folder.join(file));
    }
    Ok(made)
}

/// Returns the version of the compiler, whose standard library is in the program.
fn rust_version(root: &Path) -> anyhow::Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = Cmd::new(rustc).args(["--version"]).output(root)?;
    let said = said.map_err(|message| anyhow::anyhow!("rustc: {message}"))?;
    Ok(said.split(' ').nth(1).context("rustc has no version")?.to_owned())
}

/// Sources of all archives but the program.
struct Dist<'a> {
    root: &'a Path,
    components: Vec<Component>,
    /// Debian packages and crates that were made in the folder.
    further: Vec<PathBuf>,
    rust: String,
    epoch: u64,
}

impl Dist<'_> {
    /// Packs all archives in `folder`. Returns their paths.
    fn pack(&self, program: &Path, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let version = workspace_version(self.root)?;
        let name = format!("ringfence-{version}-x86_64-linux");
        let bytes = std::fs::read(program).with_context(|| program.display().to_string())?;
        let glibc = sbom::glibc_in(&bytes);
        if glibc.is_none() {
            println!(
                "{} is not static: the archives are for a trial, because the program needs the libraries of this system",
                program.display()
            );
        }
        let sbom = sbom::render(&self.components, glibc.as_deref(), &self.rust);
        let read = |name: &str| std::fs::read_to_string(self.root.join(name));
        let licences = [
            ("LICENSE-APACHE", read("LICENSE-APACHE")?),
            ("LICENSE-MIT", read("LICENSE-MIT")?),
            ("THIRD-PARTY.txt", licences::collect(&self.components, glibc.as_deref())?),
        ];
        let (debug, debug_archive) = self.debug_archive(program, &name, folder)?;
        let tree = Tree::new(folder.join("tree"))?;
        tree.copy("bin/ringfence", 0o755, program)?;
        strip(&tree.place("bin/ringfence")?, &debug)?;
        let stripped = std::fs::read(tree.place("bin/ringfence")?)?;
        self.fill(&tree, program, &licences, &sbom)?;
        let main_archive = archive::tar_xz(&tree, &name, folder, self.epoch)?;
        tree.remove()?;
        std::fs::remove_dir_all(debug.parent().context("a file is in a folder")?)?;
        let wheel = Wheel {
            version: &version,
            program: &stripped,
            readme: &read("README.md")?,
            licences: &licences,
            sbom: &sbom,
        };
        let wheel = wheel.build(folder, self.epoch)?;
        let sbom_file = folder.join(format!("ringfence-{version}.cdx.json"));
        std::fs::write(&sbom_file, &sbom)?;
        let mut made = vec![main_archive, debug_archive, wheel, sbom_file];
        let package = SystemPackage {
            root: self.root,
            version: &version,
            program,
            stripped: &stripped,
            licences: &licences,
            sbom: &sbom,
            epoch: self.epoch,
        };
        made.push(arch::build(&package, folder)?);
        if rpm::is_possible() {
            made.extend(rpm::build(&package, folder)?);
        } else {
            println!("rpmbuild is missing (Debian package rpm): no RPM package");
        }
        made.extend(self.further.iter().cloned());
        made.push(archive::write_sums(&made, folder)?);
        Ok(made)
    }

    /// Packs the same program under an older version in `folder`, as what a trial upgrades from.
    fn pack_older(&self, program: &Path, folder: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(folder)?;
        let own = folder.join("ringfence");
        std::fs::copy(program, &own).with_context(|| program.display().to_string())?;
        let stripped = Cmd::new("strip").args(["--strip-all".as_ref(), own.as_os_str()]);
        stripped.output(folder)?.map_err(|message| anyhow::anyhow!("strip: {message}"))?;
        let stripped = std::fs::read(&own)?;
        std::fs::remove_file(&own)?;
        let wheel =
            Wheel { version: OLDER, program: &stripped, readme: "", licences: &[], sbom: "{}" };
        wheel.build(folder, self.epoch)?;
        let package = SystemPackage {
            root: self.root,
            version: OLDER,
            program,
            stripped: &stripped,
            licences: &[],
            sbom: "{}",
            epoch: self.epoch,
        };
        arch::build(&package, folder)?;
        if rpm::is_possible() {
            rpm::build(&package, folder)?;
        }
        Ok(())
    }

    /// Packs the names and lines of the program for debuggers. Returns the file, which the caller removes with its folder,
    /// and the archive.
    fn debug_archive(
        &self,
        program: &Path,
        name: &str,
        folder: &Path,
    ) -> anyhow::Result<(PathBuf, PathBuf)> {
        let tree = Tree::new(folder.join("debug"))?;
        let debug = tree.place("ringfence.debug")?;
        let split = Cmd::new("objcopy").args([
            "--only-keep-debug".as_ref(),
            "--compress-debug-sections".as_ref(),
            program.as_os_str(),
            debug.as_os_str(),
        ]);
        split.output(folder)?.map_err(|message| anyhow::anyhow!("objcopy: {message}"))?;
        let archive = archive::tar_xz(&tree, &format!("{name}-debug"), folder, self.epoch)?;
        Ok((debug, archive))
    }

    /// Adds all files but the program.
    fn fill(
        &self,
        tree: &Tree,
        program: &Path,
        licences: &[(&str, String)],
        sbom: &str,
    ) -> anyhow::Result<()> {
        for link in contents::NAMES {
            tree.link(&format!("libexec/ringfence/{link}"), "../../bin/ringfence")?;
        }
        contents::add_generated(tree, "share", program)?;
        contents::add_guides(tree, "share", self.root)?;
        contents::add_profiles(tree, "share", self.root)?;
        let dist = self.root.join("dist");
        for (name, _, mode) in contents::SYSTEM_FILES {
            tree.copy(&format!("share/ringfence/{name}"), *mode, &dist.join(name))?;
        }
        for (name, text) in licences {
            tree.add(&format!("share/doc/ringfence/{name}"), 0o644, text)?;
        }
        tree.add("share/doc/ringfence/ringfence.cdx.json", 0o644, sbom)
    }
}

/// Removes the names and lines from a program, and refers debuggers to the file that has them.
fn strip(program: &Path, debug: &Path) -> anyhow::Result<()> {
    let folder = debug.parent().context("a file is in a folder")?;
    let stripped = Cmd::new("strip").args(["--strip-all".as_ref(), program.as_os_str()]);
    stripped.output(folder)?.map_err(|message| anyhow::anyhow!("strip: {message}"))?;
    let link = format!("--add-gnu-debuglink={}", debug.display());
    let linked = Cmd::new("objcopy").args([link.as_ref(), program.as_os_str()]);
    linked.output(folder)?.map_err(|message| anyhow::anyhow!("objcopy: {message}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a program of the system, which stands for the product: only an ELF file can be stripped.
    fn program() -> Option<PathBuf> {
        let is_missing = |name: &&str| !Cmd::new(*name).args(["--version"]).probe();
        if let Some(name) = ["objcopy", "strip", "xz", "zip", "zstd"].into_iter().find(is_missing) {
            println!("SKIPPED: {name} is missing (Debian packages binutils, xz-utils, zip, zstd)");
            return None;
        }
        // Prints whatever it is asked for, as the manual and the completions.
        Some(PathBuf::from("/bin/echo"))
    }

    #[test]
    fn archives_of_two_folders_are_equal() {
        let Some(program) = program() else { return };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let crates = folder.path().join("crates");
        let mut components = dependencies::tests::example();
        for component in &mut components {
            component.folder = crates.join(&component.name);
            std::fs::create_dir_all(&component.folder).unwrap();
        }
        let (rust, epoch) = ("1.88.0".to_owned(), 1_000_000_000);
        let dist = Dist { root, components, further: Vec::new(), rust, epoch };
        let mut made = Vec::new();
        for part in ["one", "two/deeper with blanks"] {
            let folder = folder.path().join(part);
            std::fs::create_dir_all(&folder).unwrap();
            made.push(dist.pack(&program, &folder).unwrap());
            let left = std::fs::read_dir(&folder).unwrap().count();
            let policy = rpm::is_possible() && rpm::has_policy_compiler();
            let expected = 6 + usize::from(rpm::is_possible()) + usize::from(policy);
            assert_eq!(
                left, expected,
                "only the archives, the bill of materials and the checksums"
            );
        }
        for (one, two) in made[0].iter().zip(&made[1]) {
            assert!(
                std::fs::read(one).unwrap() == std::fs::read(two).unwrap(),
                "{}",
                one.display()
            );
        }
        let list =
            Cmd::new("tar").args(["--list".as_ref(), "--file".as_ref(), made[0][0].as_os_str()]);
        let list = list.output(folder.path()).unwrap().unwrap();
        for path in [
            "bin/ringfence",
            "libexec/ringfence/pasta",
            "share/bash-completion/completions/ringfence",
            "share/doc/ringfence/THIRD-PARTY.txt",
            "share/ringfence/apparmor/ringfence",
            "share/ringfence/ringfence-serve.service",
            "share/ringfence/ringfence-vhost-user-net@.service",
            "share/ringfence/ringfence-shield@.service",
        ] {
            assert!(
                list.lines().any(|line| line.ends_with(&format!("-x86_64-linux/{path}"))),
                "{path}: {list}"
            );
        }
    }
}
