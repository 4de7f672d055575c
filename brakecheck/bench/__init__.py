"""The controller: starts workers, schedules ABBA blocks, stops on precision, keeps the run."""
