//! Steps that run test programs of this workspace.

use taskkit::text::count;

use crate::built::{Kind, Program};
use crate::context::{Context, Ended, outcome_of, test_outcome};
use crate::marks::{self, Marks};
use crate::packages::{crates, depends_on, integration_tests, package_name};
use crate::programs::{self, Order};
use crate::report::Outcome;
use crate::{attack, packages};

/// Packages whose integration tests run programs that must be installed: the step `local` runs these.
const WITH_PROGRAMS: [&str; 4] = ["ringfence", "block", "nbd", "bench"];
/// Package of which only some integration tests do so, and the prefix of their names.
const SOME_WITH_PROGRAMS: (&str, &str) = ("testkit", "block_");
/// Programs without libtest, whose tests have no marks: package, target, and the tests of the default set. The long set runs
/// all of them.
const LONG: [(&str, &str, &[&str]); 3] = [
    ("ringfence", "attack_random", &[]),
    (
        "ringfence",
        "attack_roles",
        &[
            "control::launcher_that_does_not_read",
            "control::mute_connection",
            "control::connection_without_proof",
            "control::process_of_another_user_namespace",
            "control::disk_that_hangs",
            "control::limits_of_the_first_launcher",
            "descriptors::",
            "serve::",
        ],
    ),
    (
        "ringfence",
        "syscalls",
        &["call_missing_from_list", "disk_in_file", "disk_of_server", "outgoing_traffic"],
    ),
];
/// Programs beside which no other may run: package, and target or its prefix. The first two identify kernel objects by number
/// and watch all processes; benchmarks compare counts and times.
const ALONE: [(&str, &str); 3] =
    [("ringfence", "lifecycle"), ("ringfence", "attack_random"), ("bench", "bench")];

pub(super) fn is_local(program: &Program) -> bool {
    program.kind == Kind::Integration && is_local_target(&program.krate, &program.target)
}

fn is_local_target(krate: &str, target: &str) -> bool {
    let (some, prefix) = SOME_WITH_PROGRAMS;
    WITH_PROGRAMS.contains(&krate) || (krate == some && target.starts_with(prefix))
}

/// Returns the tests of the default set, for a program in [`LONG`].
fn default_tests(program: &Program) -> Option<&'static [&'static str]> {
    let is_it = |(krate, target, _): &&(&str, &str, &[&str])| {
        program.kind == Kind::Integration && program.krate == *krate && program.target == *target
    };
    LONG.iter().find(is_it).map(|(_, _, tests)| *tests)
}

fn is_alone(program: &Program) -> bool {
    let is_it = |(krate, target): &(&str, &str)| {
        program.krate == *krate && program.target.starts_with(target)
    };
    program.kind == Kind::Integration && ALONE.iter().any(is_it)
}

/// Returns the name of a program among the parts of its step: `network` of `local`, `net/vif` of `unit`.
fn part_name(krate: &str, target: Option<&str>) -> String {
    match target {
        None => krate.to_owned(),
        Some(target) if krate == "ringfence" => target.to_owned(),
        Some(target) => format!("{krate}/{target}"),
    }
}

pub(super) fn part_of(program: &Program) -> String {
    let target = (program.kind == Kind::Integration).then_some(program.target.as_str());
    part_name(&program.krate, target)
}

/// Returns the programs of the default set that `is_wanted`, restricted by `--only STEP/PART`.
pub(crate) fn default_orders(
    context: &Context,
    step: &str,
    is_wanted: fn(&Program) -> bool,
) -> anyhow::Result<Vec<Order>> {
    let start = format!("{step}/");
    let parts: Vec<&str> =
        context.only.iter().filter_map(|part| part.strip_prefix(&start)).collect();
    let is_named =
        |program: &&Program| parts.is_empty() || parts.contains(&part_of(program).as_str());
    let programs = context.built()?.iter().filter(|p| is_wanted(p)).filter(is_named);
    let programs = programs.filter(|program| default_tests(program) != Some(&[]));
    let order = |program: &Program| {
        let chosen = default_tests(program).unwrap_or_default();
        let args = if context.filter.is_empty() {
            chosen.iter().try_for_each(|name| program.ensure_tests(&[name]))?;
            chosen.iter().map(ToString::to_string).collect()
        } else {
            context.filter.clone()
        };
        Ok(Order { program: program.clone(), args, is_alone: is_alone(program), path: None })
    };
    programs.map(order).collect()
}

pub(super) fn build(context: &Context) -> anyhow::Result<Ended> {
    Ok(match context.built() {
        Ok(programs) => Outcome::Passed(count(programs.len(), "test program")).into(),
        Err(error) => outcome_of(false, &format!("{error:#}")),
    })
}

/// Runs the tests of libraries and programs, and the integration tests that the step `local` leaves.
pub(super) fn unit(context: &Context) -> anyhow::Result<Ended> {
    let orders = default_orders(context, "unit", |program| !is_local(program))?;
    Ok(test_outcome(programs::run(orders, &context.setting(false))))
}

/// Runs the integration tests of the binary and of disks. Each test checks its own requirements. A missing
/// one is a failure where everything could be installed.
pub(super) fn local(context: &Context) -> anyhow::Result<Ended> {
    if !context.require_local {
        println!("a test that lacks something will be skipped, and named in the report");
    }
    let orders = default_orders(context, "local", is_local)?;
    Ok(test_outcome(programs::run(orders, &context.setting(true))))
}

/// Programs of the default set, for `cargo xtask soak tests`.
pub(crate) fn all_orders(context: &Context) -> anyhow::Result<Vec<Order>> {
    default_orders(context, "", |_| true)
}

/// Programs of the step `unit`, which have the property tests, for `cargo xtask soak tests`.
pub(crate) fn unit_orders(context: &Context) -> anyhow::Result<Vec<Order>> {
    default_orders(context, "", |program| !is_local(program))
}

pub(super) fn unit_parts(context: &Context) -> anyhow::Result<Vec<String>> {
    parts(&marks::find(&context.root)?, false)
}

pub(super) fn local_parts(context: &Context) -> anyhow::Result<Vec<String>> {
    parts(&marks::find(&context.root)?, true)
}

/// Returns the parts of a step in the long set: programs with a marked test, and whole programs.
fn parts(marks: &Marks, local: bool) -> anyhow::Result<Vec<String>> {
    let marked = marks.keys().filter(|(krate, target)| {
        target.as_deref().is_some_and(|target| is_local_target(krate, target)) == local
    });
    let mut names: Vec<String> =
        marked.map(|(krate, target)| part_name(krate, target.as_deref())).collect();
    if local {
        names.extend(LONG.iter().map(|(krate, target, _)| part_name(krate, Some(target))));
    }
    names.sort();
    names.dedup();
    Ok(names)
}

/// Returns the parts of `local` with tests in the default set.
pub(super) fn local_programs(context: &Context) -> anyhow::Result<Vec<String>> {
    let mut names = vec![];
    for krate in crates(&context.root)? {
        let name = krate.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for test in integration_tests(&krate)? {
            let test = test.to_string_lossy();
            let is_left_out = LONG.iter().any(|(krate, target, tests)| {
                *krate == name && *target == test && tests.is_empty()
            });
            if is_local_target(&name, &test) && !is_left_out {
                names.push(part_name(&name, Some(&test)));
            }
        }
    }
    Ok(names)
}

/// Runs the long tests of a program.
pub(super) fn long_part(context: &Context, part: &str) -> anyhow::Result<Ended> {
    let marks = marks::find(&context.root)?;
    let mut orders = vec![];
    for program in context.built()?.iter().filter(|program| part_of(program) == part) {
        let target = (program.kind == Kind::Integration).then(|| program.target.clone());
        let mut args = context.filter.clone();
        if default_tests(program).is_none() {
            let Some(names) = marks.get(&(program.krate.clone(), target)) else { continue };
            args.push("--ignored".to_owned());
            args.extend(names.iter().filter(|_| context.filter.is_empty()).cloned());
        }
        orders.push(Order { program: program.clone(), args, is_alone: true, path: None });
    }
    let is_local = orders.iter().any(|order| is_local(&order.program));
    Ok(test_outcome(programs::run(orders, &context.setting(is_local))))
}

/// Runs the examples in the documentation.
pub(super) fn examples(context: &Context) -> anyhow::Result<Ended> {
    let run = context.cargo_test(&["--workspace", "--doc"], &[]).run_tests(&context.root)?;
    Ok(if run.success {
        Outcome::Passed(count(run.ran(), "example")).into()
    } else {
        test_outcome(run)
    })
}

/// Returns the crates that depend on loom.
pub(super) fn loom_parts(context: &Context) -> anyhow::Result<Vec<String>> {
    let mut names = vec![];
    for krate in crates(&context.root)? {
        let manifest = std::fs::read_to_string(krate.join("Cargo.toml"))?;
        if depends_on(&manifest, "loom")? {
            names.extend(krate.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    anyhow::ensure!(!names.is_empty(), "no crate depends on loom");
    Ok(names)
}

/// Runs the tests named `loom` of a package that depends on loom, built with `--cfg loom`. Their own
/// target directory keeps the flag from invalidating the common one.
pub(super) fn loom(context: &Context, part: &str) -> anyhow::Result<Ended> {
    let krate = crates(&context.root)?.into_iter().find(|krate| krate.ends_with(part));
    let Some(krate) = krate else { return Ok(outcome_of(false, "there is no such crate")) };
    let package = package_name(&std::fs::read_to_string(krate.join("Cargo.toml"))?)?;
    let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(" --cfg loom");
    let mut command = context
        .cargo_test(&["--release", "--package", &package, "--lib"], &["loom"])
        .env("RUSTFLAGS", flags.to_string_lossy().trim())
        .env("CARGO_TARGET_DIR", context.target.join("loom"));
    // Few preemptions find most bugs, and the number of interleavings grows steeply with them.
    if std::env::var_os("LOOM_MAX_PREEMPTIONS").is_none() {
        command = command.env("LOOM_MAX_PREEMPTIONS", "3");
    }
    let run = command.run_tests(&context.root)?;
    if run.success && run.passed == 0 {
        let why = format!("{package} depends on loom, but has no test named loom");
        return Ok(Outcome::Failed(why).into());
    }
    Ok(test_outcome(run))
}

/// Returns the test programs of the attack suite.
pub(super) fn attack_parts(context: &Context) -> anyhow::Result<Vec<String>> {
    let names = integration_tests(&context.root.join(packages::PRODUCT))?;
    let names =
        names.iter().filter_map(|name| name.to_str()).filter(|name| attack::is_of_suite(name));
    Ok(names.map(str::to_owned).collect())
}

/// Runs a test program of the attack suite as the ordinary user.
pub(super) fn attack(context: &Context, part: &str) -> anyhow::Result<Ended> {
    if !context.toolbox.is_root {
        let why = "this is an ordinary user: `local` runs the suite";
        return Ok(Outcome::Skipped(why.to_owned()).into());
    }
    let is_it = |program: &&Program| {
        program.krate == "ringfence" && program.kind == Kind::Integration && program.target == part
    };
    let Some(program) = context.built()?.iter().find(is_it) else {
        return Ok(outcome_of(false, "cargo built no such program"));
    };
    attack::run_as_ordinary_user(program)
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    fn root() -> std::path::PathBuf {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    #[test]
    fn marks_and_tables_name_programs_that_exist() {
        let mut programs = vec![];
        for krate in crates(&root()).unwrap() {
            let name = krate.file_name().unwrap().to_string_lossy().into_owned();
            for test in integration_tests(&krate).unwrap() {
                programs.push((name.clone(), test.to_string_lossy().into_owned()));
            }
        }
        for (krate, target) in marks::find(&root()).unwrap().into_keys() {
            if let Some(target) = target {
                assert!(programs.contains(&(krate.clone(), target.clone())), "{krate}/{target}");
            }
        }
        let with_bench = ("bench".to_owned(), crate::built::WITH_BENCH.to_owned());
        assert!(programs.contains(&with_bench), "{with_bench:?}");
        let long = LONG.map(|(krate, target, _)| (krate, target));
        for (krate, target) in long.iter().chain(&ALONE) {
            let exists = |(k, t): &(String, String)| k == krate && t.starts_with(target);
            assert!(programs.iter().any(exists), "{krate}/{target}");
        }
    }

    #[test]
    fn each_mark_is_a_part_of_one_step() {
        let marks: Marks = [
            (("net".to_owned(), None), vec!["a".to_owned()]),
            (("testkit".to_owned(), Some("revoke".to_owned())), vec!["b".to_owned()]),
            (("testkit".to_owned(), Some("block_vbd".to_owned())), vec!["c".to_owned()]),
            (("ringfence".to_owned(), None), vec!["d".to_owned()]),
            (("ringfence".to_owned(), Some("network".to_owned())), vec!["e".to_owned()]),
        ]
        .into();
        assert_eq!(parts(&marks, false).unwrap(), ["net", "ringfence", "testkit/revoke"]);
        assert_eq!(
            parts(&marks, true).unwrap(),
            ["attack_random", "attack_roles", "network", "syscalls", "testkit/block_vbd"]
        );
    }
}
