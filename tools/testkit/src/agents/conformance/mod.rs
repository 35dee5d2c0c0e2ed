//! `ringfence-bench internal conformance`: the platform's conformance suite on real Xen.
//!
//! One half runs in this domain, the other half in a peer domain; then the roles are swapped. The
//! program prints one line for each case and succeeds if no case failed. Cases that Xen cannot run are
//! listed by name (`NOT_ON_XEN`). A skipped case that is not listed counts as a failure.

mod notice;

use std::io::Write;
use std::time::Duration;

use crate::conformance::{CaseReport, Outcome, Role, Suite, prepare};
use clap::{Args, ValueEnum};
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{DomId, Platform, PlatformError};
use ringfence_xenstore::StoreAccess;

/// Cases about features that Xen lacks.
const NOT_ON_XEN: [&str; 3] =
    ["force_takes_a_page_in_use", "force_takes_many_at_once", "a_closed_channel_is_noticed"];

/// Domain id of no domain: on Xen a grant or channel can name a domain that does not exist.
const NOBODY: DomId = DomId(DomId::FIRST_RESERVED.0 - 1);

/// Role of this domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Half {
    /// Grants pages and opens channels.
    Lender,
    /// Uses the pages and channels of the lender.
    User,
}

/// Runs one half of the conformance suite on Xen
#[derive(Debug, Args)]
pub struct ConformanceArgs {
    /// Half of the suite to run
    #[arg(long)]
    pub role: Half,

    /// The domain that runs the other half
    #[arg(long, value_name = "DOMID")]
    pub peer: u16,

    /// Time limit for each step of the other half
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub patience: u64,

    /// Only lend one page under this name, or map the one so lent, and hold it until killed
    #[arg(long, value_name = "NAME")]
    hold: Option<String>,

    /// Run only the cases of grant windows, which need a hypervisor that has them
    #[arg(long, conflicts_with = "hold")]
    windows: bool,
}

impl ConformanceArgs {
    fn role(&self) -> Role {
        match self.role {
            Half::Lender => Role::Lender,
            Half::User => Role::User,
        }
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience)
    }
}

/// Runs one half of the suite, or holds one page. Returns `true` if every case is as it must be.
///
/// # Errors
///
/// Returns an error if this domain cannot use Xen's devices, or if no page could be held.
pub fn run(args: &ConformanceArgs) -> anyhow::Result<bool> {
    let platform = XenPlatform::open(Side::Both)?;
    match &args.hold {
        Some(name) => {
            let peer = DomId(args.peer);
            notice::hold(&platform, args.role(), peer, name, args.patience()).map(|()| true)
        }
        None => Ok(run_suite(&platform, args)?),
    }
}

/// Runs the suite and prints it. Returns `true` if every case is as it must be.
fn run_suite(platform: &XenPlatform, args: &ConformanceArgs) -> Result<bool, PlatformError> {
    let own = platform.domid();
    let mut store = platform.store()?;
    // Toolstacks create this directory for guests but not for dom0.
    if store.get_perms(&format!("/local/domain/{own}/data")).is_err() {
        prepare(&mut store, own)?;
    }
    drop(store);
    let role = args.role();
    println!("domain {own} is the {role}, domain {} the {}", args.peer, role.other());
    let (mut passed, mut failed, mut absent) = (0, 0, 0);
    let mut tell = |case: CaseReport| {
        match &case.outcome {
            Outcome::Passed => passed += 1,
            Outcome::Skipped(_) if !is_surprise(&case) => absent += 1,
            Outcome::Skipped(_) | Outcome::Failed(_) => failed += 1,
        }
        println!("{}", line_of(&case));
        // Flush each line: the console's domain may be about to be destroyed.
        let _ = std::io::stdout().flush();
    };
    let (peer, patience) = (DomId(args.peer), args.patience());
    let suite = Suite { role, peer, third: Some(NOBODY), patience };
    let summary = if args.windows {
        suite.run_windows(platform, &mut tell)
    } else {
        suite.run(platform, &mut tell)
    };
    if summary.passed > 0 && !args.windows {
        notice::run(platform, role, peer, patience, &mut tell);
    }
    println!("{role}: {passed} passed, {failed} failed, {absent} not on this platform");
    Ok(failed == 0 && passed > 0)
}

/// Returns `true` if a case was skipped although Xen can run it.
fn is_surprise(case: &CaseReport) -> bool {
    matches!(case.outcome, Outcome::Skipped(_)) && !NOT_ON_XEN.contains(&case.name)
}

fn line_of(case: &CaseReport) -> String {
    match &case.outcome {
        Outcome::Skipped(why) if !is_surprise(case) => {
            format!("not on this platform: {}: {why}", case.name)
        }
        Outcome::Skipped(why) => format!("SKIPPED  {}, which Xen can do: {why}", case.name),
        Outcome::Passed | Outcome::Failed(_) => case.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_case_outside_not_on_xen_list_is_a_surprise() {
        let skipped = |name| CaseReport { name, outcome: Outcome::Skipped("why".into()) };
        let known = skipped("force_takes_a_page_in_use");
        assert!(!is_surprise(&known));
        assert_eq!(line_of(&known), "not on this platform: force_takes_a_page_in_use: why");
        let other = skipped("copies_go_both_ways");
        assert!(is_surprise(&other));
        assert!(line_of(&other).contains("which Xen can do"));
        let failed = CaseReport { name: "x", outcome: Outcome::Failed("why".into()) };
        assert!(!is_surprise(&failed), "a failure is counted as one");
    }
}
