//! Store keys of a vif. Feature keys are `0` or `1`.
//!
//! A frontend with one queue keeps the ring and event keys at the top of its directory. With several
//! queues they must be in [`queue_directory`] instead.
//!
//! Each key's comment begins with its writer: the backend, the frontend, or the toolstack.

/// Either end: accepts packets of several fragments. Absent: no.
pub const FEATURE_SG: &str = "feature-sg";
/// Either end: accepts large TCP packets over IPv4. Absent: no.
pub const FEATURE_GSO_TCPV4: &str = "feature-gso-tcpv4";
/// Either end: accepts large TCP packets over IPv6. Absent: no.
pub const FEATURE_GSO_TCPV6: &str = "feature-gso-tcpv6";
/// Either end: `1` if it refuses blank IPv4 checksums. Absent: it accepts them.
pub const FEATURE_NO_CSUM_OFFLOAD: &str = "feature-no-csum-offload";
/// Either end: accepts blank IPv6 checksums. Absent: no.
pub const FEATURE_IPV6_CSUM_OFFLOAD: &str = "feature-ipv6-csum-offload";

/// Backend: copies packets into the pages of rx requests.
pub const FEATURE_RX_COPY: &str = "feature-rx-copy";
/// Backend: gives pages away on rx (obsolete).
pub const FEATURE_RX_FLIP: &str = "feature-rx-flip";
/// Backend: filters multicast packets on request before Connected.
pub const FEATURE_MULTICAST_CONTROL: &str = "feature-multicast-control";
/// Backend: accepts multicast filter requests at any time.
pub const FEATURE_DYNAMIC_MULTICAST_CONTROL: &str = "feature-dynamic-multicast-control";
/// Backend: supports one event channel for each ring.
pub const FEATURE_SPLIT_EVENT_CHANNELS: &str = "feature-split-event-channels";
/// Backend: maximum number of queues. Absent: 1.
pub const MULTI_QUEUE_MAX_QUEUES: &str = "multi-queue-max-queues";
/// Backend: provides a control ring.
pub const FEATURE_CTRL_RING: &str = "feature-ctrl-ring";
/// Backend, Ringfence only: `1` if it opens the grant windows of queues ([`RINGFENCE_TX_WINDOW`]). Absent: no.
pub const FEATURE_RINGFENCE_WINDOW: &str = "feature-ringfence-window";
/// Backend: `0` while the carrier is off. Absent: on.
pub const CARRIER: &str = "carrier";
/// Toolstack, for the backend: `connected` once the hotplug script has configured the interface.
pub const HOTPLUG_STATUS: &str = "hotplug-status";

/// Frontend: gref of the tx ring.
pub const TX_RING_REF: &str = "tx-ring-ref";
/// Frontend: gref of the rx ring.
pub const RX_RING_REF: &str = "rx-ring-ref";
/// Frontend: event channel shared by both rings.
pub const EVENT_CHANNEL: &str = "event-channel";
/// Frontend: event channel of the tx ring.
pub const EVENT_CHANNEL_TX: &str = "event-channel-tx";
/// Frontend: event channel of the rx ring.
pub const EVENT_CHANNEL_RX: &str = "event-channel-rx";
/// Frontend, Ringfence only, per queue: grant window of tx references with bit 31 set. Absent: none.
pub const RINGFENCE_TX_WINDOW: &str = "ringfence-tx-window";
/// Frontend, Ringfence only, per queue: grant window of the rx ring. Absent: none.
pub const RINGFENCE_RX_WINDOW: &str = "ringfence-rx-window";
/// Frontend, Ringfence only, per queue: number of references of [`RINGFENCE_TX_WINDOW`], reserved ones included. Xen
/// needs it to open the window. Absent: the platform finds the number.
pub const RINGFENCE_TX_WINDOW_REFERENCES: &str = "ringfence-tx-window-references";
/// Frontend, Ringfence only, per queue: number of references of [`RINGFENCE_RX_WINDOW`].
pub const RINGFENCE_RX_WINDOW_REFERENCES: &str = "ringfence-rx-window-references";
/// Frontend: requests that packets are copied into its pages.
pub const REQUEST_RX_COPY: &str = "request-rx-copy";
/// Frontend: notifies the backend after posting rx requests.
pub const FEATURE_RX_NOTIFY: &str = "feature-rx-notify";
/// Frontend: requests multicast filtering.
pub const REQUEST_MULTICAST_CONTROL: &str = "request-multicast-control";
/// Frontend: number of queues used. Absent: 1.
pub const MULTI_QUEUE_NUM_QUEUES: &str = "multi-queue-num-queues";
/// Frontend: gref of the control ring.
pub const CTRL_RING_REF: &str = "ctrl-ring-ref";
/// Frontend: event channel of the control ring.
pub const EVENT_CHANNEL_CTRL: &str = "event-channel-ctrl";

/// Toolstack: Ethernet address, as `aa:bb:cc:dd:ee:ff`.
pub const MAC: &str = "mac";
/// Toolstack, for the backend: rate limit of the guest's transmissions, as `BYTES,MICROSECONDS`.
/// Absent: no limit.
pub const RATE: &str = "rate";
/// Toolstack: number of the device in its domain.
pub const HANDLE: &str = "handle";
/// Toolstack, in the frontend's directory: the MTU. Absent: 1500.
pub const MTU: &str = "mtu";
/// Toolstack, in the frontend's directory: `0` if the guest does not trust the backend.
pub const TRUSTED: &str = "trusted";

/// MTU if the key [`MTU`] is absent.
pub const MTU_DEFAULT: u16 = 1500;

/// Names the directory of a queue below the frontend's, used with several queues.
pub fn queue_directory(queue: u32) -> String {
    format!("queue-{queue}")
}
