"""Times of updates, for repair in place."""

from adaptor.mindio.interface import tft_can_do_uce_repair, tft_set_update_end_time, tft_set_update_start_time
